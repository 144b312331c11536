"""Rules that hold for every file of the repository."""

import ast
import re
import statistics
import subprocess
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.pace import patience

ROOT = Path(__file__).parents[1]
MAX_FUNCTION_LINES = 50
MAX_PUBLIC_METHODS = 20
MAX_ATTRIBUTES = 20
# Classes that are wider than that today. The list only shrinks.
WIDE_CLASSES = {
    "gateway/scheduler/live_request.py:LiveRequest",
    "scheduler_svc/core/kv/slots.py:SlotTable",
    "scheduler_svc/core/request/sequence.py:Sequence",
    "scheduler_svc/core/scheduler.py:Scheduler",
    "scheduler_svc/core/step/state.py:SchedulerState",
    "scheduler_svc/core/view.py:View",
    "scheduler_svc/engine.py:Engine",
    "scheduler_svc/group.py:WorkerGroup",
    "scheduler_svc/journal/calls.py:TappedScheduler",
    "worker_svc/runner/graphs/asked_graphs.py:AskedGraphs",
}
GENERATED = "pagewire/v1/"
UNPICKLERS = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
# Joined here, so that this file passes its own test.
REGISTRIES = [
    ".".join(parts)
    for parts in (
        ("pypi", "org"),
        ("pythonhosted", "org"),
        ("download", "pytorch", "org"),
        ("pypi", "nvidia", "com"),
        ("npmjs", "org"),
        ("proxy", "golang", "org"),
        ("crates", "io"),
        ("anaconda", "org"),
    )
]
INDEX_OPTION = re.compile(r"--(extra-)?index-url|--find-links|PIP_(EXTRA_)?INDEX_URL")


def files() -> list[Path]:
    """Files that are tracked by git, or would be with the next commit."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
        timeout=patience(30),
    ).stdout.split("\0")
    return [ROOT / name for name in listed if name and (ROOT / name).is_file()]


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def unpickling(source: str) -> Iterator[str]:
    """Constructs of a Python source that could run code from data, as text."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                modules = [alias.name for alias in names]
            case ast.ImportFrom(module=str(module), names=names):
                modules = [module]
                if module == "torch" and any(alias.name == "load" for alias in names):
                    yield f"line {node.lineno}: torch.load"
            case ast.Attribute(value=ast.Name(id="torch"), attr="load"):
                yield f"line {node.lineno}: torch.load"
                continue
            case ast.keyword(arg="allow_pickle", value=ast.Constant(value=True)):
                yield f"line {node.value.lineno}: allow_pickle"
                continue
            case _:
                continue
        for module in modules:
            if module.split(".")[0] in UNPICKLERS or module.startswith("multiprocessing.conn"):
                yield f"line {node.lineno}: {module}"


def test_there_are_files_to_look_at() -> None:
    names = {relative(path) for path in files()}
    assert {
        "pyproject.toml",
        "protos/pagewire/v1/worker.proto",
        "tests/test_repository.py",
    } <= names


@dataclass(frozen=True, slots=True)
class Width:
    """Public methods of a class, and the attributes that it sets itself."""

    num_methods: int
    num_attributes: int


def width_of(node: ast.ClassDef) -> Width:
    """The width of a class; fields that it only declares are data, and not counted."""
    functions = [n for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    attributes = {
        n.attr
        for function in functions
        for n in ast.walk(function)
        if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)
        if isinstance(n.value, ast.Name) and n.value.id == "self"
    }
    return Width(sum(not f.name.startswith("_") for f in functions), len(attributes))


def wide_classes() -> dict[str, Width]:
    """Classes of the product that are wider than one can keep in mind, by place."""
    return {
        f"{relative(path)}:{node.name}": width
        for path in files()
        if path.suffix == ".py" and not relative(path).startswith((GENERATED, "tests/"))
        for node in statements(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
        for width in [width_of(node)]
        if width.num_methods > MAX_PUBLIC_METHODS or width.num_attributes > MAX_ATTRIBUTES
    }


def test_no_class_is_wider_than_one_can_keep_in_mind() -> None:
    wide = wide_classes()
    assert wide.keys() - WIDE_CLASSES == set()
    assert WIDE_CLASSES - wide.keys() == set(), "narrow now: take it off the list"


def test_the_width_of_a_class_counts_what_it_sets_and_offers() -> None:
    source = """
class A:
    declared: int

    def __init__(self):
        self.a, self._b = 1, 2

    def public(self):
        self.a = self.c = 0

    async def awaited(self): ...

    def _private(self): ...
"""
    (node,) = ast.parse(source).body
    assert isinstance(node, ast.ClassDef)
    assert width_of(node) == Width(num_methods=2, num_attributes=3)


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """The statements below a node, in any order: an expression holds none."""
    left = [tree]
    while left:
        for node in ast.iter_child_nodes(left.pop()):
            if isinstance(node, ast.stmt | ast.excepthandler | ast.match_case):
                yield node
                left.append(node)


def function_lengths() -> dict[str, int]:
    """Lines of each function outside `kernels/`, from `def` to its end, by place."""
    return {
        f"{relative(path)}:{node.lineno} {node.name}": node.end_lineno - node.lineno + 1
        for path in files()
        if path.suffix == ".py" and not relative(path).startswith((GENERATED, "kernels/"))
        for node in statements(ast.parse(path.read_text()))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.end_lineno
    }


def test_functions_are_short() -> None:
    lengths = function_lengths()
    assert {place: n for place, n in lengths.items() if n > MAX_FUNCTION_LINES} == {}
    assert statistics.median(lengths.values()) < 10


def test_the_changelog_has_the_version_that_is_built() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    changelog = (ROOT / "CHANGELOG.md").read_text()
    heading = rf"^## \[?{re.escape(version)}\]?(\s|$)"
    assert re.search(heading, changelog, re.MULTILINE), f"CHANGELOG.md has no heading for {version}"


def test_no_source_runs_code_out_of_data() -> None:
    found = {
        relative(path): ways
        for path in files()
        if path.suffix == ".py"
        and not relative(path).startswith("tests/")
        and (ways := list(unpickling(path.read_text())))
    }
    assert found == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import os, cloudpickle as c",
        "from pickle import loads",
        "import torch\nx = torch.load('a')",
        "from torch import load",
        "np.load(path, allow_pickle=True)",
        "def f():\n    from multiprocessing.connection import Client",
    ],
)
def test_every_way_of_unpickling_is_recognized(source: str) -> None:
    assert len(list(unpickling(source))) == 1


@pytest.mark.parametrize(
    "source", ["import json", "import torch\ntorch.save", "loads(x)", "load(a, allow_pickle=False)"]
)
def test_what_only_looks_like_unpickling_is_allowed(source: str) -> None:
    assert list(unpickling(source)) == []


def test_no_file_says_where_packages_come_from() -> None:
    found = []
    for path in files():
        text = path.read_bytes().decode(errors="replace")
        found += [f"{relative(path)}: {host}" for host in REGISTRIES if host in text]
        if path != Path(__file__):
            found += [f"{relative(path)}: {m.group()}" for m in INDEX_OPTION.finditer(text)]
    assert found == []


def test_no_module_has_a_name_that_says_nothing() -> None:
    nameless = {"utils.py", "util.py", "helpers.py", "common.py", "misc.py"}
    assert [relative(path) for path in files() if path.name in nameless] == []
