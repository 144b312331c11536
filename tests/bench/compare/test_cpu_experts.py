"""The comparison of experts on a CPU: both sides compute a small shape, and say how quickly."""

import json

import pytest

from bench.compare import cpu_experts as bench


def test_both_sides_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--layers", "1", "--streams", "2", "--prompt-tokens", "3", "--output-tokens", "2"]
    bench.main(["--shape", "tiny", *sizes, "--repeats", "1", "--threads", "1"])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["side"] for row in rows] == ["transformers", "pagewire"]
    assert all(row["tokens_per_s"] > 0 and row["streams"] == 2 for row in rows)
