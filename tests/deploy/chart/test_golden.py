"""Each set of values renders what it rendered before; a change of the chart shows as a difference.

`PAGEWIRE_WRITE_GOLDEN=1 python -m pytest tests/deploy/chart` writes them anew.
"""

import os
from pathlib import Path

import pytest

from tests.deploy.chart.rendering import CHART, SETS, rendered_text, run, tool

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize("name", SETS)
def test_it_renders_as_before(name: str) -> None:
    path, text = GOLDEN / f"{name}.txt", rendered_text(name)
    if os.environ.get("PAGEWIRE_WRITE_GOLDEN"):
        path.write_text(text)
    assert path.read_text() == text


def test_there_is_no_golden_of_a_set_that_is_gone() -> None:
    assert sorted(path.stem for path in GOLDEN.glob("*.txt")) == SETS
    assert len(SETS) >= 12


@pytest.mark.parametrize("name", SETS)
def test_helm_lints(name: str) -> None:
    values = str(Path(__file__).parent / "values" / f"{name}.yaml")
    done = run(tool("helm"), "lint", "--strict", str(CHART), "--values", values)
    assert done.returncode == 0, done.stdout + done.stderr


def test_nothing_but_comments_and_lines_with_content_is_rendered() -> None:
    """No template leaves a gap, and no value that was not there."""
    for name in SETS:
        for number, line in enumerate(rendered_text(name).splitlines(), 1):
            assert not line.endswith(" "), f"{name}:{number}: ends with a space"
            assert "<nil>" not in line and "<no value>" not in line, f"{name}:{number}: {line}"
