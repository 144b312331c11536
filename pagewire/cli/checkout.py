"""Commands that run a module of a checkout of the repository, since this package lacks their code.

The module parses the arguments that the command does not know.
"""

import argparse
import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pagewire.cli.options import CommandError

if TYPE_CHECKING:
    from pagewire.cli.options import Subparsers

HERE = Path(__file__).resolve().parents[2]


def add_command(commands: "Subparsers", name: str, summary: str) -> argparse.ArgumentParser:
    """Adds a subcommand whose options, --help included, are a module's; its own is --checkout."""
    parser = commands.add_parser(name, help=summary, add_help=False, allow_abbrev=False)
    parser.add_argument("--checkout", type=Path, default=HERE)
    parser.set_defaults(rest=[])
    return parser


def run_module(
    options: argparse.Namespace,
    module: str,
    file: str,
    what: str,
    libraries: Sequence[str] = (),
) -> int:
    """Runs `module` in a checkout that has `file`; returns its exit status.

    Raises CommandError, naming `what` or the libraries, when checkout or libraries are missing.
    """
    checkout = options.checkout.resolve()
    if not (checkout / file).is_file():
        raise CommandError(
            f"{checkout} holds no {what}: it runs from a checkout of the repository (see "
            "--checkout); the package alone is the client"
        )
    missing = [name for name in libraries if importlib.util.find_spec(name) is None]
    if missing:
        raise CommandError(f"{module} needs {' and '.join(missing)}, which this Python lacks")
    # -P: ignores a folder of the module's name in the working directory.
    command = [sys.executable, "-P", "-m", module, *options.rest]
    paths = [str(checkout), *filter(None, [os.environ.get("PYTHONPATH")])]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.run(command, env=environ, check=False).returncode
