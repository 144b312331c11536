"""Commands that run a module which this package does not import: of the services, or a benchmark.

The services are inside the installed package, in a folder that only such a module has on its path,
or in the checkout around the package; the benchmarks are in a checkout only. The module parses the
arguments that the command does not know.
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

_PACKAGE = Path(__file__).resolve().parents[1]
SHIPPED = _PACKAGE / "_services"
HERE = SHIPPED if SHIPPED.is_dir() else _PACKAGE.parent


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
            f"{checkout} holds no {what}: a checkout of the repository does; name it with "
            "--checkout DIR"
        )
    missing = [name for name in libraries if importlib.util.find_spec(name) is None]
    if missing:
        raise CommandError(f"{module} needs {' and '.join(missing)}, which this Python lacks")
    command = [sys.executable, "-m", module, *options.rest]
    return subprocess.run(command, env=environment(checkout), check=False).returncode


def environment(code: Path) -> dict[str, str]:
    """The variables of a process that imports its modules from the folder `code`.

    It and its children ignore a folder of such a name in the working directory.
    """
    paths = [str(code), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"}
