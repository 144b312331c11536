"""The table of all options is that of the four parsers, and every variable that is read is named.

After a change of options, write it anew with PAGEWIRE_WRITE_GOLDEN=1.
"""

import argparse
import os
import re
from pathlib import Path

import gateway.process.config
import scheduler_svc.config
import worker_svc.config
from pagewire.cli.launcher.options.up_options import PASSED, add_options, passed_words
from pagewire.settings import known
from pagewire.settings.environment import PREFIX, variable
from pagewire.settings.sources import long_options
from tests.test_repository import files, relative


def parsers() -> dict[str, argparse.ArgumentParser]:
    up = argparse.ArgumentParser(allow_abbrev=False)
    add_options(up)
    return {
        "up": up,
        "worker": worker_svc.config.make_parser(),
        "scheduler": scheduler_svc.config.make_parser(),
        "gateway": gateway.process.config.make_parser(),
    }


def test_the_table_is_that_of_the_parsers() -> None:
    found = {command: tuple(long_options(parser)) for command, parser in parsers().items()}
    if os.environ.get("PAGEWIRE_WRITE_GOLDEN"):
        write(found)
    assert found == known.OPTIONS, "write it anew with PAGEWIRE_WRITE_GOLDEN=1"


def write(found: dict[str, tuple[str, ...]]) -> None:
    path = Path(known.__file__)
    head, _, rest = path.read_text().partition("OPTIONS: ")
    lines = ["OPTIONS: dict[str, tuple[str, ...]] = {"]
    for command, options in found.items():
        lines += [f'    "{command}": (', *(f'        "{option}",' for option in options), "    ),"]
    path.write_text(head + "\n".join([*lines, "}"]) + rest[rest.index("\n\n# Variables") :])


def test_what_up_passes_on_is_an_option_of_that_service() -> None:
    for option in PASSED:
        assert option.name in known.OPTIONS[option.service]
        action = long_options(parsers()[option.service])[option.name]
        assert (action.nargs == 0) == (option.metavar is None)


def test_up_passes_an_option_on_as_often_as_it_was_given() -> None:
    given = ["--ignore-weights=v_head.*", "--ignore-weights", "score.weight", "--no-page"]
    options = parsers()["up"].parse_args(given)
    words = passed_words(options, "worker")
    assert words == ("--ignore-weights", "v_head.*", "--ignore-weights", "score.weight")
    assert passed_words(options, "gateway") == ("--no-page",)


def test_no_two_options_have_one_variable_with_two_meanings() -> None:
    # `up` names the ports of its services as the services' own longer variables do.
    same = {"PAGEWIRE_SCHEDULER_PORT", "PAGEWIRE_WORKER_PORT"}
    short = {variable(option) for options in known.OPTIONS.values() for option in options}
    long = {
        variable(option, command)
        for command, options in known.OPTIONS.items()
        for option in options
    }
    assert short & long == same


def test_every_variable_in_the_sources_is_an_option_or_in_the_list_of_others() -> None:
    options = {variable(option) for names in known.OPTIONS.values() for option in names}
    read = {
        name
        for path in files()
        if path.suffix == ".py" and not relative(path).startswith("tests/pagewire/")
        for name in re.findall(rf'"({PREFIX}[A-Z_]+)"', path.read_text())
    }
    assert read - options == set(known.VARIABLES)
