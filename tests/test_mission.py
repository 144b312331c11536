"""docs/mission.md: every row is there once, its tests exist, and what it sums up is so."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "mission.md"
NUM_ROWS = dict(zip("ABCDEFGHIJK", (6, 20, 19, 18, 13, 11, 15, 12, 9, 8, 10), strict=True))
HERE = ("yes", "in part", "no", "other")
ROW = re.compile(
    r"^\| (?P<name>[A-Z]\d+) \| (?P<what>[^|]+) \| (?P<here>[^|]+) \| (?P<tests>[^|]+) "
    r"\|(?P<remark>[^|]*)\|$"
)
CODE = re.compile(r"`([^`]+)`")


def rows() -> list[re.Match[str]]:
    lines = PAGE.read_text().splitlines()
    return [found for line in lines if (found := ROW.match(line)) is not None]


@cache
def names_in(path: Path) -> frozenset[str]:
    """The names of the test functions of a file."""
    nodes = ast.walk(ast.parse(path.read_text()))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(n.name for n in nodes if isinstance(n, kinds) and n.name[:5] == "test_")


def named(tests: str) -> Iterator[tuple[str, str]]:
    """File and name of each test of a row: a file stands before the names of its tests."""
    file = ""
    for word in CODE.findall(tests):
        if word.endswith(".py"):
            file = word
        else:
            yield file, word


def missing(tests: str) -> list[tuple[str, str]]:
    """The tests of a row that do not exist."""
    return [
        (file, name)
        for file, name in named(tests)
        if not (ROOT / file).is_file() or name not in names_in(ROOT / file)
    ]


def test_every_row_is_there_once_and_in_order() -> None:
    expected = [f"{letter}{n}" for letter, count in NUM_ROWS.items() for n in range(1, count + 1)]
    assert len(expected) == 141
    assert sorted(row["name"] for row in rows()) == sorted(expected)
    letters = [row["name"][0] for row in rows()]
    assert letters == sorted(letters)
    table = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    assert len(table) == 141 + 2, "a row that the pattern does not read"


def test_every_named_test_exists() -> None:
    assert {row["name"]: gone for row in rows() if (gone := missing(row["tests"]))} == {}


def test_a_row_that_holds_has_a_test_and_one_that_does_not_says_why() -> None:
    for row in rows():
        assert row["here"] in HERE, row["name"]
        if row["here"] in ("yes", "other"):
            assert list(named(row["tests"])), row["name"]
        if row["here"] != "yes":
            assert row["remark"].strip(), row["name"]


def test_the_sums_are_those_of_the_table() -> None:
    sums = Counter(row["here"] for row in rows())
    said = (
        f"{sums['yes']} hold, {sums['in part']} in part, {sums['no']} do not, "
        f"{sums['other']} are done in another way"
    )
    assert said in " ".join(PAGE.read_text().split())


def test_a_test_that_is_gone_is_found() -> None:
    here = "`tests/test_mission.py`: `test_the_sums_are_those_of_the_table`"
    assert missing(here) == []
    assert missing(f"{here}, `test_that_is_gone`") == [
        ("tests/test_mission.py", "test_that_is_gone")
    ]
    assert missing(here.replace("mission", "nowhere"))
    assert missing("`test_without_a_file`")
