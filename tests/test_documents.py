"""Rules for the Markdown documents: links and paths lead somewhere, tables are whole."""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path, PurePosixPath

import pytest

from tests.test_repository import ROOT, files, relative

MAX_README_LINES = 160
MAX_STEPS, MAX_STEP_LINES = 12, 5
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`((?:[^`\n]|\n(?!\n))+)`")  # may go on in the next line
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
MODULE = re.compile(r"python -m\s+([a-z0-9_]+(?:\.[a-z0-9_]+)*)(?!\.?\w)")
SOURCE = re.compile(r"[\w-]+\.(py|pyi|c|h|proto)")
STATUS = re.compile(r"Status: (?P<status>\w+)\. Date: (?P<date>\d{4}-\d\d-\d\d)\.")
DECISION_ROW = re.compile(
    r"\| (?P<number>\d+) \| \[(?P<title>.*)\]\((?P<name>.*)\) \| (?P<status>.*) \| (?P<date>.*) \|"
)


@cache
def tracked() -> frozenset[PurePosixPath]:
    """Every file of the repository and every folder that has one, from the root."""
    names = [PurePosixPath(relative(path)) for path in files()]
    return frozenset(names) | {parent for name in names for parent in name.parents}


def documents() -> list[Path]:
    return [path for path in files() if path.suffix == ".md"]


def dead_links(document: Path, text: str) -> Iterator[str]:
    """Relative links that lead to no file, or to no heading of it."""
    for target in LINK.findall(FENCE.sub("", text)):
        if "://" in target:
            continue
        path, _, fragment = target.partition("#")
        linked = (document.parent / path).resolve() if path else document
        leads = linked.exists()
        if leads and fragment:
            leads = fragment in anchors(linked.read_text() if path else text)
        if not leads:
            yield target


def anchors(text: str) -> set[str]:
    """The fragments that headings can be linked by."""
    headings = HEADING.findall(FENCE.sub("", text))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def dead_paths(text: str) -> Iterator[str]:
    """Paths in backticks that begin at the root and name nothing there.

    A source file without its folders counts as well: documents name files in full, so that a move
    can rewrite them.
    """
    top = {path.parts[0] for path in tracked() if path.parts}
    for word in (word for code in CODE.findall(FENCE.sub("", text)) for word in code.split()):
        path = PurePosixPath(word)
        is_ours = "/" in word and path.parts[0] in top
        if (is_ours or SOURCE.fullmatch(word)) and path not in tracked():
            yield word


def dead_modules(text: str) -> Iterator[str]:
    """Modules of ours that a command runs and that are not there."""
    top = {path.parts[0] for path in tracked() if path.parts}
    for module in MODULE.findall(text):
        path = PurePosixPath(*module.split("."))
        runs = {path.with_suffix(".py"), path / "__main__.py"}
        if path.parts[0] in top and not runs & tracked():
            yield module


def torn_tables(text: str) -> Iterator[str]:
    """The first line of each run of table rows whose second line does not name its columns."""
    lines = ["", *FENCE.sub("", text).splitlines(), ""]
    for before, line, after in zip(lines, lines[1:], lines[2:], strict=False):
        begins = line.startswith("|") and not before.startswith("|")
        if begins and not re.fullmatch(r"\|( :?-+:? \|)+", after):
            yield line


@pytest.mark.parametrize("document", documents(), ids=relative)
def test_what_a_document_names_is_there(document: Path) -> None:
    text = document.read_text()
    assert list(dead_links(document, text)) == []
    assert list(dead_paths(text)) == []
    assert list(dead_modules(text)) == []
    assert list(torn_tables(text)) == []


def test_the_readme_is_short_and_names_every_folder() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= MAX_README_LINES
    folders = {path.parts[0] for path in tracked() if len(path.parts) > 1}
    missing = {each for each in folders if not each.startswith(".") and f"`{each}/" not in text}
    assert missing == set(), "its tree lacks folders"


def test_a_requests_life_is_twelve_short_steps_and_a_table_of_their_files() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    life = text.partition("## The life of a request\n")[2].partition("\n## ")[0]
    prose, _, table = life.partition("| step | files |")
    steps = [step.strip() for step in re.split(r"^(?=\d+\. )", prose, flags=re.MULTILINE)[1:]]
    assert 1 < len(steps) <= MAX_STEPS
    assert [step.split(".")[0] for step in steps] == [str(i + 1) for i in range(len(steps))]
    assert {step: n for step in steps if (n := len(step.splitlines())) > MAX_STEP_LINES} == {}
    rows = re.findall(r"^\| (\d+)", table, re.MULTILINE)
    assert list(dict.fromkeys(rows)) == [str(i + 1) for i in range(len(steps))]


def test_the_index_of_decisions_has_each_with_its_title_status_and_date() -> None:
    folder = ROOT / "docs" / "decisions"
    rows = [*DECISION_ROW.finditer((folder / "README.md").read_text())]
    written = []
    for path in sorted(folder.glob("[0-9]*.md")):
        title, _, status, *_ = path.read_text().splitlines()
        found = STATUS.match(status)
        assert found is not None, path.name
        number, title = title.removeprefix("# ").split(". ", 1)
        written.append((number, title, path.name, found["status"], found["date"]))
    assert [row.groups() for row in rows] == written


@pytest.mark.parametrize(
    ("text", "dead"),
    [
        ("[a](tests/test_documents.py) [b](https://a.b/c) [c](#one)\n# One", []),
        ("[a](missing.md)", ["missing.md"]),
        ("[a](README.md#no-such-heading)", ["README.md#no-such-heading"]),
        ("[a](#no-such-heading)\n# One", ["#no-such-heading"]),
        ("```text\n[a](missing.md)\n```", []),
    ],
)
def test_a_link_to_nothing_is_found(text: str, dead: list[str]) -> None:
    assert list(dead_links(ROOT / "README.md", text)) == dead


@pytest.mark.parametrize(
    ("text", "dead"),
    [
        ("`tests/test_documents.py` `tests/` `tests/e2e` `and/or` `a/b.py`", []),
        ("`tests/missing.py` is not there", ["tests/missing.py"]),
        ("`pytest tests/missing/`", ["tests/missing/"]),
        ("`test_documents.py` without its folder", ["test_documents.py"]),
        ("`pyproject.toml`, `config.json`, `Makefile`", []),
    ],
)
def test_a_path_to_nothing_is_found(text: str, dead: list[str]) -> None:
    assert list(dead_paths(text)) == dead


def test_a_module_that_is_not_there_is_found() -> None:
    text = (
        "`python -m gateway`, `python -m\ngateway.missing`, `python -m bench.NAME`, `python -m pip`"
    )
    assert list(dead_modules(text)) == ["gateway.missing"]


@pytest.mark.parametrize(
    ("text", "torn"),
    [
        ("| a | b |\n| --- | ---: |\n| 1 | 2 |\n", []),
        ("| a | b |\n| --- | --- |\n| 1 | 2 |\n\n| 3 | 4 |\n", ["| 3 | 4 |"]),
        ("```text\n| a |\n```\n", []),
    ],
)
def test_a_torn_table_is_found(text: str, torn: list[str]) -> None:
    assert list(torn_tables(text)) == torn
