"""One public class name, one file: a reader who searches for a name finds one class.

What the tests themselves define is left out: their fakes are read next to their tests.
"""

import ast
from collections import defaultdict
from collections.abc import Iterable

from tests.test_repository import GENERATED, files, relative

MAX_SHARED = 10
_SDK_SPEAKS = "the SDK's public word; the gateway means the same, and neither may import the other"
# By name: why more than one file has a class of that name.
SHARED = {
    "DebugService": "each service implements the contract's service of this name",
    "FinishReason": f"{_SDK_SPEAKS}; the core has more reasons, and imports neither",
    "JsonSchema": _SDK_SPEAKS,
    "Message": _SDK_SPEAKS,
    "Regex": _SDK_SPEAKS,
    "SamplingParams": _SDK_SPEAKS,
    "Tool": _SDK_SPEAKS,
    "ToolCall": _SDK_SPEAKS,
    "Usage": _SDK_SPEAKS,
}


def shared_names(sources: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Public classes of modules that more than one file defines, with those files."""
    homes: dict[str, list[str]] = defaultdict(list)
    for name, source in sources:
        for node in ast.parse(source).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(name)
    return {name: sorted(where) for name, where in homes.items() if len(where) > 1}


def test_a_public_class_name_is_used_once() -> None:
    python = [path for path in files() if path.suffix == ".py"]
    named = [(relative(path), path) for path in python]
    ours = [
        (name, path.read_text())
        for name, path in named
        if not name.startswith((GENERATED, "tests/"))
    ]
    assert len(ours) > 200
    found = shared_names(ours)
    assert {name: where for name, where in found.items() if name not in SHARED} == {}
    assert set(SHARED) == set(found), "an exception that is none any more"
    assert len(SHARED) <= MAX_SHARED


def test_a_name_in_two_files_is_found_and_private_ones_are_not() -> None:
    one, two = (
        "class Step:\n    pass\nclass _Hidden: ...\n",
        "class Step: ...\nclass _Hidden: ...\n",
    )
    assert shared_names([("a.py", one), ("b.py", two)]) == {"Step": ["a.py", "b.py"]}
    assert shared_names([("a.py", one)]) == {}
