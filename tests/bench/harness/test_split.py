"""The choice of decode steps to time, and a whole measurement on the CPU."""

import json
from pathlib import Path

import pytest

from bench import steps
from bench.harness.split import idle_share, side_by_side
from pagewire.v1 import debug_pb2


def step(step_id: int, decodes: int, prefills: int = 0, idle_us: int = 0) -> debug_pb2.StepSummary:
    return debug_pb2.StepSummary(
        step_id=step_id,
        num_decode_rows=decodes,
        num_prefill_rows=prefills,
        busy_us=90,
        idle_us=idle_us,
    )


def test_only_full_decode_steps_behind_another_count() -> None:
    newest_first = [
        step(9, 1),  # one has ended
        step(8, 2, idle_us=10),
        step(7, 2, idle_us=10),
        step(6, 2, idle_us=500),  # after a prefill
        step(5, 2, prefills=1),
        step(3, 2, idle_us=700),  # of an earlier run
        step(2, 2),
    ]
    counted = side_by_side(newest_first, 4, batch=2)
    assert [one.step_id for one in counted] == [7, 8]
    assert idle_share(counted) == 0.1


def test_a_tiny_model_is_measured_through_the_split_and_what_does_not_fit_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "steps.jsonl"
    options = ["--shape", "tiny", "--batches", "2", "5", "--repeat", "1", "--json"]
    worker = ["--worker", "--device", "cpu", "--max-model-len", "1100", "--num-kv-blocks", "600"]
    assert steps.main([*options, str(path), *worker, "--max-num-seqs", "4"]) == 1
    assert "batch    5: not measured" in capsys.readouterr().out
    (line,) = map(json.loads, path.read_text().splitlines())
    assert (line["benchmark"], line["batch"], line["shape"]) == ("steps", 2, "tiny")
    # Not compared: a client that had to wait sees the answers of several steps at once.
    assert line["device_ms"]["median"] > 0
    assert line["step_ms"]["median"] > 0
    assert 0 < line["idle_share"]["median"] < 1
    assert line["environment"]["command"].startswith("python -m bench.steps --shape tiny")
