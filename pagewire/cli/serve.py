"""`pagewire serve SERVICE`: one service in this process, for a deployment with parts of its own."""

import argparse
import os
import sys
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from pagewire.cli import checkout, options
from pagewire.cli.launcher.services import find_checkout
from pagewire.cli.requirements import require

if TYPE_CHECKING:
    from pagewire.cli.options import Subparsers

MODULES = {"gateway": "gateway", "scheduler": "scheduler_svc", "worker": "worker_svc"}
SUMMARIES = {
    "gateway": "Text in, text out: the OpenAI-compatible API and the gRPC API.",
    "scheduler": "Decides what each step computes; needs one worker or several.",
    "worker": "Runs the model on a GPU or on the CPU.",
}


def add_parser(commands: "Subparsers") -> None:
    """Adds the command; the options of each kind are the service's own."""
    parser = options.add_command(commands, "serve", "Run one service; `up` runs all three.")
    kinds = parser.add_subparsers(title="services", metavar="SERVICE", required=True)
    for name, summary in SUMMARIES.items():
        added = checkout.add_command(kinds, name, summary)
        added.set_defaults(run=partial(run, name))


def run(name: str, given: argparse.Namespace) -> NoReturn:
    """Becomes the service, so that signals and the exit status are its own."""
    code = find_checkout(given.checkout.resolve())
    require(name)
    command = [sys.executable, "-m", MODULES[name], *given.rest]
    os.execve(sys.executable, command, checkout.environment(code))
