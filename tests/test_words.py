"""Words that the prose of the repository does without, in documents, comments and help texts.

Rows, requests and processes are named as what they are, never by an indefinite pronoun; time and
order are "after", "in addition to" or "compared with", never a word of place.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.test_repository import GENERATED, files, relative

# Folders whose words are still to be rewritten.
PACKAGES_TO_DO: list[str] = []
REFUSED = re.compile(r"\b(whoever|somebody|nobody|everybody|behind|beside)\b", re.IGNORECASE)
# Phrases in which a word of place speaks of a place, each with the place.
PLACES = {
    "behind one port": "a network address hides several processes",
    "behind one pair of ports": "a network address hides several processes",
    "behind the same ports": "a network address hides several processes",
    "behind a proxy": "a position in the network",
}
PLACE = re.compile(
    "|".join(r"\s+".join(map(re.escape, phrase.split())) for phrase in PLACES), re.IGNORECASE
)
C_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
C_LIKE = {".c", ".h", ".proto"}
WHOLE = {".md", ".toml", ".yaml", ".yml", ".sh"}
HAS_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True, slots=True)
class Passage:
    """Prose of a file, and the line on which it begins."""

    line: int
    text: str


def found_in(passages: Iterator[Passage]) -> list[str]:
    """Each refused word as `line: word`."""
    return [
        f"{passage.line + text.count(chr(10), 0, match.start())}: {match.group()}"
        for passage in passages
        for text in [PLACE.sub(lambda m: re.sub(r"\S", "_", m.group()), passage.text)]
        for match in REFUSED.finditer(text)
    ]


def comments(source: str) -> Iterator[Passage]:
    """Comments of a Python source; lines that follow each other are one passage."""
    begin, lines = 0, list[str]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        if lines and token.start[0] != begin + len(lines):
            yield Passage(begin, "\n".join(lines))
            lines = []
        if not lines:
            begin = token.start[0]
        lines.append(token.string.lstrip("#"))
    if lines:
        yield Passage(begin, "\n".join(lines))


def strings(source: str, docstrings_only: bool) -> Iterator[Passage]:
    """Docstrings of a Python source; with them all its other strings, help texts among them."""
    for node in ast.walk(ast.parse(source)):
        if docstrings_only and isinstance(node, HAS_DOCSTRING):
            first = node.body[0] if node.body else None
            node = first.value if isinstance(first, ast.Expr) else node
        elif docstrings_only:
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield Passage(node.lineno, node.value)


def prose(name: str, text: str) -> Iterator[Passage]:
    """The prose of a file: of tests no string but docstrings, since the others are data."""
    suffix = Path(name).suffix
    if suffix == ".py":
        yield from comments(text)
        yield from strings(text, docstrings_only=name.startswith("tests/"))
    elif suffix in C_LIKE:
        for match in C_COMMENT.finditer(text):
            yield Passage(text.count("\n", 0, match.start()) + 1, match.group())
    elif suffix in WHOLE or name == "Makefile":
        yield Passage(1, text)


@cache
def findings() -> dict[str, list[str]]:
    """The refused words of each file that has any."""
    found = {}
    for path in files():
        name = relative(path)
        is_read = path.suffix in C_LIKE | WHOLE | {".py"} or path.name == "Makefile"
        if is_read and not name.startswith(GENERATED) and REFUSED.search(path.read_text()):
            found[name] = found_in(prose(name, path.read_text()))
    return {name: words for name, words in found.items() if words}


# Docstrings that begin so are mostly clauses without a head, as "What it costs." is. Those of the
# list are whole sentences with such a clause as subject.
CLAUSE = re.compile(r"(What|Whether|Those|Of|How|Which|Where)\b")
SENTENCES = {
    "tests/e2e/metrics/test_chart_names.py",
    "tests/gateway/edge/test_json_count.py",
    "tests/gateway/outputs/test_refusals.py",
    "tests/gateway/scheduler/test_lost_connections.py",
    "tests/gateway/test_large_calls.py",
    "tests/pagewire/gguf/test_header.py",
    "tests/scheduler_svc/speculation/test_acceptance.py",
    "tests/scheduler_svc/speculation/test_lookup.py",
    "tests/scheduler_svc/speculation/test_pay.py",
    "tests/scheduler_svc/speculation/test_prices.py",
    "tests/wire/test_counts.py",
    "tests/worker_svc/gguf/test_refusals.py",
    "tests/worker_svc/quantization/test_writers.py",
    "tests/worker_svc/sampling/test_sampling_proofs.py",
    "tests/worker_svc/serving/test_links.py",
}


def clauses() -> dict[str, list[str]]:
    """The docstrings of each file that begin as a clause without a head does."""
    found = dict[str, list[str]]()
    for path in files():
        name = relative(path)
        if path.suffix != ".py" or name.startswith(GENERATED):
            continue
        told = [passage.text for passage in strings(path.read_text(), docstrings_only=True)]
        if begun := [text.splitlines()[0] for text in told if CLAUSE.match(text)]:
            found[name] = begun
    return found


def test_the_first_sentence_of_a_docstring_has_a_head() -> None:
    found = clauses()
    assert found.keys() >= SENTENCES, "of these some are gone: take them off the list"
    assert all(len(found[name]) == 1 for name in SENTENCES), "one sentence a file is excepted"
    assert {name: texts for name, texts in found.items() if name not in SENTENCES} == {}


def package(name: str) -> str:
    return name.split("/")[0]


def test_no_prose_has_a_refused_word() -> None:
    done = {
        name: words for name, words in findings().items() if package(name) not in PACKAGES_TO_DO
    }
    assert done == {}


def test_what_is_still_to_do_has_something_to_do() -> None:
    rewritten = set(PACKAGES_TO_DO) - {package(name) for name in findings()}
    assert rewritten == set(), "take these out of PACKAGES_TO_DO"


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("a.py", '"""Waits for\n\nnobody."""', ["3: nobody"]),
        ("a.py", "def f():\n    '''Behind it.'''\n", ["2: Behind"]),
        ("a.py", "x = 1  # beside y\n", ["1: beside"]),
        ("a.py", "# one\n# of everybody\n", ["2: everybody"]),
        ("a.py", "add('--x', help='for whoever asks')\n", ["1: whoever"]),
        ("a.py", "f(f'{a} is behind')\n", ["1: behind"]),
        ("tests/a.py", 'x = 1\n"""nobody"""\nclass A:\n    """Nobody."""\n', ["4: Nobody"]),
        ("a.proto", "message A {}\n// of somebody\n", ["2: somebody"]),
        ("a.c", "int a; /* one\n behind */\n", ["2: behind"]),
        ("a.md", "# A\n\nwhoever\n", ["3: whoever"]),
        ("Makefile", "a: ## for everybody\n", ["1: everybody"]),
    ],
)
def test_a_refused_word_is_found(name: str, text: str, found: list[str]) -> None:
    assert found_in(prose(name, text)) == found


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.py", '"""Several gateways behind\n    one port."""'),
        ("a.py", "# behind one\n# port\n"),
        ("a.py", "def abort_everybody(): ...\n"),
        ("tests/a.py", "user = 'nobody'\n"),
        ("a.proto", "string nobody = 1;\n"),
        ("a.svg", "<text>nobody</text>"),
    ],
)
def test_places_identifiers_and_data_of_tests_are_allowed(name: str, text: str) -> None:
    assert found_in(prose(name, text)) == []
