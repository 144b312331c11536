"""The examples of docs/sdk.md, run one after the other in one namespace."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "sdk.md"


def test_every_example_of_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    text = PAGE.read_text("utf-8")
    namespace: dict[str, object] = {}
    blocks = [*re.finditer(r"```python\n(.*?)```", text, re.DOTALL)]
    assert len(blocks) >= 8
    for block in blocks:
        line = text[: block.start(1)].count("\n")
        exec(compile("\n" * line + block[1], str(PAGE), "exec"), namespace)
    assert "The capital of France is Paris." in capsys.readouterr().out
