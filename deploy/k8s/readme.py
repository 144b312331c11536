"""Writes the table of values into the chart's README, from the comments in values.yaml.

    python deploy/k8s/readme.py            # writes it
    python deploy/k8s/readme.py --check    # fails if it is not what the comments say

Each value has a line `## @param NAME text` above it; what has none, or has one and is not there, is
an error. `## @section` begins a table.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).resolve().parent / "chart"
README, VALUES = CHART / "README.md", CHART / "values.yaml"
BEGIN = "<!-- The tables below are written by deploy/k8s/readme.py. -->\n"
COMMENT = re.compile(r"^ *## @(?P<kind>section|param) (?P<text>.*)$", re.MULTILINE)


class Undocumented(ValueError):
    """Raised when comments and values do not say the same."""


def leaves(values: Any, documented: set[str], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values below a mapping with their dotted names, down to those that have a comment."""
    for name, value in values.items():
        path = f"{prefix}{name}"
        if isinstance(value, dict) and path not in documented:
            yield from leaves(value, documented, f"{path}.")
        else:
            yield path, value


def tables() -> str:
    """The tables, as Markdown. Raises Undocumented."""
    source = VALUES.read_text()
    comments = [(match["kind"], match["text"]) for match in COMMENT.finditer(source)]
    texts = dict(text.split(" ", 1) for kind, text in comments if kind == "param")
    defaults = dict(leaves(yaml.safe_load(source), set(texts)))
    if texts.keys() != defaults.keys():
        raise Undocumented(f"either comment or value is missing: {texts.keys() ^ defaults.keys()}")
    if len(texts) != len([kind for kind, _ in comments if kind == "param"]):
        raise Undocumented("a value has two comments")
    lines = []
    for kind, text in comments:
        if kind == "section":
            lines += ["", f"### {text}", "", "| value | meaning | default |", "| --- | --- | --- |"]
        else:
            name = text.split(" ", 1)[0]
            lines.append(f"| `{name}` | {texts[name]} | `{json.dumps(defaults[name])}` |")
    return "\n".join([*lines, ""])


def main() -> int:
    """Writes or checks, and returns the exit status."""
    parser = argparse.ArgumentParser(description="The table of values in the chart's README.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if it is stale")
    options = parser.parse_args()
    current = README.read_text()
    head, found, _ = current.partition(BEGIN)
    if not found:
        raise Undocumented(f"{README} has no line {BEGIN.strip()}")
    wanted = head + BEGIN + tables()
    if options.check:
        return 0 if current == wanted else 1
    README.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
