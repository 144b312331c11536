"""`pagewire replay`: a recording of a scheduler, played to its code or to a worker."""

import argparse
from typing import TYPE_CHECKING

from pagewire.cli.checkout import add_command, run_module

if TYPE_CHECKING:
    from pagewire.cli.options import Subparsers


def add_parser(commands: "Subparsers") -> None:
    """Declares the command; its options are those of `python -m scheduler_svc.journal`."""
    summary = "Replay what a scheduler recorded: the same plans, on a worker the same tokens."
    add_command(commands, "replay", summary).set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Runs the replay: 0 when everything is equal, 1 when not, 2 when it cannot be replayed."""
    file = "scheduler_svc/journal/__main__.py"
    return run_module(options, "scheduler_svc.journal", file, "scheduler")
