"""The `pagewire` command: parses the line, runs one subcommand, reports failures in one line."""

import argparse
import sys
from collections.abc import Sequence

from pagewire import __version__
from pagewire._errors import PagewireError
from pagewire._terminal import Style
from pagewire.cli import chat, complete, explain, keys, replay, simulate, status
from pagewire.cli.benchmark import bench
from pagewire.cli.launcher import up
from pagewire.cli.options import CommandError

INTERRUPTED = 130  # as shells report SIGINT


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status: 0, 1 for a failure, 2 for wrong usage."""
    options = _parse(arguments)
    try:
        return int(options.run(options))
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()  # the reader has left; the interpreter would report it at exit
        return 1
    except (CommandError, PagewireError, OSError) as error:
        style = Style(sys.stderr)
        sys.stderr.write(f"{style.red('pagewire: error:')} {error}\n")
        return 1
    except ValueError as error:  # an option's value that a constructor refused
        sys.stderr.write(f"pagewire: error: {error}\n")
        return 2


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options; a command with `rest` gets the arguments that its own parser does not know."""
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    if rest and "rest" not in options:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    options.rest = rest
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pagewire",
        description="Serve a language model, talk to it, look into it, measure it.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"pagewire {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in (up, chat, complete, status, explain, keys, bench, simulate, replay):
        command.add_parser(commands)
    return parser
