"""Keyword arguments as the options of `pagewire up`. Pure; knows the table of options alone."""

import json
import shlex
from collections.abc import Iterator, Mapping
from os import PathLike, fspath

from pagewire.cli.launcher.options.up_options import SERVICES, explain_unknown
from pagewire.settings import environment, other_engines
from pagewire.settings.known import OPTIONS

# An engine of one program serves that program alone: addresses, keys and the end are its own.
DECIDED = (
    "host",
    "http-port",
    "grpc-port",
    "scheduler-port",
    "worker-port",
    "tls",
    "api-key",
    "api-keys",
    "once",
    "no-sample",
    "demo",
)


def to_words(given: Mapping[str, object]) -> list[str]:
    """The words for `pagewire up`. Raises TypeError for an unknown name, as any function does.

    Names are those of the options with _ in place of -. What an option of `up` does not cover goes
    to the one service that has it. True is a switch, None and False are left out, a list is an
    option that is repeated, a dictionary is JSON. `enable_x=False` is the switch `no_x`.
    """
    own: list[str] = []
    passed: dict[str, list[str]] = {service: [] for service in SERVICES}
    for keyword, value in given.items():
        name, value = _spelled(keyword.replace("_", "-"), value)
        if name in DECIDED:
            raise TypeError(f"LLM() decides {keyword} itself; `pagewire up` serves others")
        owner = _owner(name, keyword)
        if name == f"{owner}-options" and isinstance(value, str):
            passed[owner] += shlex.split(value)
        else:
            passed.get(owner, own).extend(_option(name, value))
    return own + [f"--{of}-options={shlex.join(words)}" for of, words in passed.items() if words]


def neutral_environment() -> dict[str, str]:
    """The variables of what is decided here, empty: those that the user has set are for servers."""
    names = (environment.variable(name, command) for name in DECIDED for command in ("", "up"))
    return dict.fromkeys(names, "")


def _spelled(name: str, value: object) -> tuple[str, object]:
    """The option that a switch of the form enable-x turns off, if there is one."""
    off = name.replace("enable-", "no-", 1)
    if name.startswith("enable-") and any(off in options for options in OPTIONS.values()):
        return off, value is False
    return name, value


def _owner(name: str, keyword: str) -> str:
    """The process whose option it is. Raises TypeError."""
    for service in SERVICES:
        if name == f"{service}-options":
            return service
    if name in OPTIONS["up"] or name in other_engines.OPTIONS:
        return "up"  # which says what to do in place of another engine's
    owners = [service for service in SERVICES if name in OPTIONS[service]]
    if len(owners) != 1:
        raise TypeError(
            f"LLM() got an unexpected option {keyword!r}: {explain_unknown([f'--{name}'])}"
        )
    return owners[0]


def _option(name: str, value: object) -> Iterator[str]:
    if value is True:
        yield f"--{name}"
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _option(name, one)
    elif isinstance(value, Mapping):
        yield f"--{name}={json.dumps(value)}"
    elif isinstance(value, PathLike):
        yield f"--{name}={fspath(value)}"
    elif value is not None and value is not False:
        yield f"--{name}={value}"
