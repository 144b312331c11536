"""`pagewire keys new`: a new API key, and its line for the file of --api-keys."""

import argparse
from typing import TYPE_CHECKING

from pagewire.cli.checkout import add_command, run_module

if TYPE_CHECKING:
    from pagewire.cli.options import Subparsers


def add_parser(commands: "Subparsers") -> None:
    """Adds the command; its options are those of the services' own module."""
    add_command(commands, "keys", "Make API keys for the gateway.").set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Runs the module; returns its exit status."""
    return run_module(options, "wire.identity", "wire/identity/__main__.py", "services")
