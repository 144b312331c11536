"""`pagewire replay`: replays a scheduler's recording on its code or on a worker."""

import argparse
from typing import TYPE_CHECKING

from pagewire.cli.checkout import add_command, run_module

if TYPE_CHECKING:
    from pagewire.cli.options import Subparsers


def add_parser(commands: "Subparsers") -> None:
    """Adds the command; its options are those of `python -m scheduler_svc.journal`."""
    summary = "Replay a scheduler's recording and compare plans, or tokens on a worker."
    add_command(commands, "replay", summary).set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Returns 0 if all was equal, 1 if not, 2 if the recording cannot be replayed."""
    file = "scheduler_svc/journal/__main__.py"
    return run_module(options, "scheduler_svc.journal", file, "scheduler")
