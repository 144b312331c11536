"""The `pagewire` command: parses the line, runs one subcommand, reports failures in one line."""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence

from pagewire import __version__
from pagewire._errors import PagewireError
from pagewire._terminal import Style
from pagewire.cli import (
    chat,
    complete,
    explain,
    health,
    keys,
    profile,
    replay,
    serve,
    simulate,
    status,
)
from pagewire.cli.benchmark import bench
from pagewire.cli.launcher import up
from pagewire.cli.options import CommandError
from pagewire.settings import environment, home, other_engines, sources
from pagewire.settings.known import OPTIONS

INTERRUPTED = 130  # as shells report SIGINT


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status: 0, 1 for a failure, 2 for wrong usage."""
    home.settle()
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
    parser, commands = _parser()
    typed = list(sys.argv[1:] if arguments is None else arguments)
    if typed[:1] == ["up"] and not {"-h", "--help"} & set(typed):
        typed[1:], asks_nothing = other_engines.without_neutral(typed[1:], frozenset(OPTIONS["up"]))
        for line in asks_nothing:
            sys.stderr.write(f"pagewire: {line}\n")
        try:
            typed[1:1] = _from_elsewhere(commands["up"], typed[1:])
        except ValueError as error:
            commands["up"].error(str(error))
    options, rest = parser.parse_known_args(typed)
    if rest and "rest" not in options:
        explain = getattr(options, "explain_unknown", None)
        parser.error(explain(rest) if explain else f"unrecognized arguments: {' '.join(rest)}")
    options.rest = rest
    return options


def _from_elsewhere(up: argparse.ArgumentParser, typed: Sequence[str]) -> list[str]:
    """The options of `up` in environment and file. Raises ValueError."""
    for line in (*environment.strangers(os.environ), *other_engines.variables(os.environ)):
        sys.stderr.write(f"pagewire: warning: {line}\n")
    return sources.words(up, typed, "up")


def _parser() -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    """The parser, and those of the commands by their names."""
    parser = argparse.ArgumentParser(
        prog="pagewire",
        description="Serve a language model, talk to it, look into it, measure it.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"pagewire {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in (up, serve, chat, complete, status, health, explain, profile):
        command.add_parser(commands)
    for command in (keys, bench, simulate, replay):
        command.add_parser(commands)
    return parser, commands.choices
