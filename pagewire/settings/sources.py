"""Options from the command line, the environment, a file and their defaults, in this precedence.

What environment and file say becomes words before those of the command line, for options that the
command line does not name. So each value is checked as if it had been typed.
"""

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pagewire.settings import config_file, environment, other_engines
from pagewire.settings.config_file import ConfigFile, Value

CONFIG = "config"
YES, NO = frozenset({"1", "true", "yes", "on"}), frozenset({"0", "false", "no", "off"})
# One key of the environment is a client's, too: it yields to a file of keys, wherever that is from.
YIELDS = {"api-key": "api-keys"}

Options = Mapping[str, argparse.Action]


class BadSetting(ValueError):
    """Raised for a value of the environment or of a file; names its place."""


def add_config(parser: argparse.ArgumentParser) -> None:
    """Adds --config."""
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="YAML file of options; the command line and PAGEWIRE_ variables go before it",
    )


def parse(
    parser: argparse.ArgumentParser,
    arguments: Sequence[str] | None,
    command: str,
    environ: Mapping[str, str] = os.environ,
) -> dict[str, Any]:
    """The options of a service from all sources, without --config; exits with a usage message."""
    typed = list(sys.argv[1:] if arguments is None else arguments)
    for line in (*environment.strangers(environ), *other_engines.variables(environ)):
        sys.stderr.write(f"{parser.prog}: warning: {line}\n")
    typed, asks_nothing = other_engines.without_neutral(typed, frozenset(long_options(parser)))
    for line in asks_nothing:
        sys.stderr.write(f"{parser.prog}: {line}\n")
    try:
        added = words(parser, typed, command, environ)
    except ValueError as error:
        parser.error(str(error))
    given, rest = parser.parse_known_args([*added, *typed])
    if rest:
        known = "; ".join(other_engines.answers(rest))
        parser.error(known or f"unrecognized arguments: {' '.join(rest)}")
    options = vars(given)
    options.pop(CONFIG)
    return options


def words(
    parser: argparse.ArgumentParser,
    typed: Sequence[str],
    command: str,
    environ: Mapping[str, str] = os.environ,
    *,
    checks_keys: bool = True,
) -> list[str]:
    """Words that environment and file add to those typed. Raises ValueError, naming the place."""
    options = long_options(parser)
    given = {word.partition("=")[0].removeprefix("--") for word in typed if word.startswith("--")}
    file = config_of(typed, command, environ)
    if file is not None and checks_keys:
        config_file.check_keys(file, command)
    section = {} if file is None else file.of(command)
    added: list[str] = []
    for name, action in options.items():
        if name in given or name == CONFIG:
            continue
        variable = environment.found(name, command, environ)
        rival = YIELDS.get(name, "")
        if rival and (rival in given or rival in section or _is_set(rival, command, environ)):
            variable = None
        if variable is not None:
            place, text = variable
            value = [part.strip() for part in text.split(",")] if _repeats(action) else text
            added += _words(action, name, value, place)
        elif name in section:
            assert file is not None
            value = _beside(file.path, action, name, section[name])
            added += _words(action, name, value, f"--config: {file.path}: {name}")
    return added


def config_of(
    typed: Sequence[str], command: str, environ: Mapping[str, str] = os.environ
) -> ConfigFile | None:
    """The file that the command line or the environment names. Raises BadConfigFile."""
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    finder.add_argument("--config", type=Path)
    path: Path | None = None
    with suppress(argparse.ArgumentError):  # the command's own parser will say it
        path = finder.parse_known_args(list(typed))[0].config
    variable = environment.found(CONFIG, command, environ)
    if path is None and variable is not None:
        path = Path(variable[1])
    return None if path is None else config_file.read(path)


def long_options(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """The options of a parser that --help lists, by their long names without dashes."""
    return {
        word.removeprefix("--"): action
        for action in parser._actions
        for word in action.option_strings
        if word.startswith("--") and action.dest != "help" and action.help != argparse.SUPPRESS
    }


def comma_separated(text: str) -> tuple[str, ...]:
    """The type of an option that takes several values in one word: A,B."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _is_set(name: str, command: str, environ: Mapping[str, str]) -> bool:
    return environment.found(name, command, environ) is not None


def _repeats(action: argparse.Action) -> bool:
    return isinstance(action, argparse._AppendAction)


def _beside(file: Path, action: argparse.Action, name: str, value: Value) -> Value:
    """A path of a file is relative to the file; a model may also have a name that is no path."""
    if action.type is not Path or not isinstance(value, str) or Path(value).is_absolute():
        return value
    path = (file.parent / value).absolute()
    return value if name == "model" and not path.exists() else str(path)


def _words(action: argparse.Action, name: str, value: Value, place: str) -> list[str]:
    """The words of one option. Raises BadSetting."""
    if isinstance(value, list) and not _repeats(action):
        if "," not in str(action.metavar):
            raise BadSetting(f"{place}: --{name} takes one value, not a list")
        value = ",".join(value)
    if action.nargs == 0:
        assert isinstance(value, str)
        if value.lower() not in YES | NO:
            raise BadSetting(f"{place}: {value!r} is neither true nor false")
        return [f"--{name}"] if value.lower() in YES else []
    texts = value if isinstance(value, list) else [value]
    for text in texts:
        _check(action, text, place)
    return [f"--{name}={text}" for text in texts]


def _check(action: argparse.Action, text: str, place: str) -> None:
    kind: Callable[[str], Any] = action.type if callable(action.type) else str
    try:
        if not text:
            raise ValueError("it has no value")
        value = kind(text)
    except argparse.ArgumentTypeError as error:
        raise BadSetting(f"{place}: {error}") from error
    except (ValueError, TypeError) as error:
        what = getattr(kind, "__name__", "value")
        problem = "it has no value" if not text else f"{text!r} is no valid {what}"
        raise BadSetting(f"{place}: {problem}") from error
    if action.choices is not None and value not in action.choices:
        known = ", ".join(map(str, action.choices))
        raise BadSetting(f"{place}: {text!r} is none of {known}")
