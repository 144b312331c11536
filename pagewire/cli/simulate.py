"""`pagewire simulate`: capacity questions, answered by the production scheduler without a worker.

The scheduler's code is not in this package: the command runs the simulator of a checkout, and
passes on every option but its own.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pagewire.cli.options import CommandError

if TYPE_CHECKING:
    from pagewire.cli.options import Subparsers

MODULE = "simulator.simulate"
HERE = Path(__file__).resolve().parents[2]


def add_parser(commands: "Subparsers") -> None:
    """Declares the command; its options are the simulator's, --help among them."""
    summary = "Answer capacity questions for a workload, faster than real time."
    parser = commands.add_parser("simulate", help=summary, add_help=False, allow_abbrev=False)
    parser.add_argument("--checkout", type=Path, default=HERE)
    parser.set_defaults(run=run, rest=[])


def run(options: argparse.Namespace) -> int:
    """Runs the simulator; its exit status is the command's."""
    checkout = options.checkout.resolve()
    if not (checkout / "simulator" / "simulate.py").is_file():
        raise CommandError(
            f"{checkout} holds no simulator: simulations run from a checkout of the repository "
            "(see --checkout); the package alone is the client"
        )
    # -P: a folder named simulator in the working directory is not ours.
    command = [sys.executable, "-P", "-m", MODULE, *options.rest]
    paths = [str(checkout), *filter(None, [os.environ.get("PYTHONPATH")])]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.run(command, env=environ, check=False).returncode
