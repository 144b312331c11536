"""`pagewire simulate`: capacity questions, answered by simulating the production scheduler."""

import argparse
from typing import TYPE_CHECKING

from pagewire.cli.checkout import add_command, run_module

if TYPE_CHECKING:
    from pagewire.cli.options import Subparsers


def add_parser(commands: "Subparsers") -> None:
    """Adds the command; its options are the simulator's."""
    summary = "Answer capacity questions for a workload, faster than real time."
    add_command(commands, "simulate", summary).set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Runs the simulator; returns its exit status."""
    return run_module(options, "simulator.simulate", "simulator/simulate.py", "simulator")
