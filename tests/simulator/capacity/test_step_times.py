"""Step times from three numbers or from measurements."""

import json
from pathlib import Path

import pytest

from scheduler_svc.core.estimate.step_time import StepTime
from simulator.capacity.step_times import BadStepTime, parse_step_time

TRUTH = StepTime(0.004, 2e-5, 1e-8)


def steps() -> list[dict[str, float]]:
    shapes = [(1, 500), (8, 9_000), (300, 2_000), (64, 90_000), (2_048, 0), (256, 200_000)]
    return [
        {
            "num_tokens": tokens,
            "num_context_tokens": context,
            "duration_s": TRUTH.of(tokens, context),
        }
        for tokens, context in shapes
    ]


def test_three_numbers_are_a_model() -> None:
    assert parse_step_time("0.004,2e-5,1e-8") == TRUTH


@pytest.mark.parametrize("form", ["lines", "list", "model"])
def test_a_file_is_a_model_or_measured_steps(tmp_path: Path, form: str) -> None:
    path = tmp_path / "steps.json"
    path.write_text(
        {
            "lines": "\n".join(map(json.dumps, steps())),
            "list": json.dumps(steps()),
            "model": '{"base_s": 0.004, "per_token_s": 2e-5, "per_context_token_s": 1e-8}',
        }[form]
    )
    found = parse_step_time(str(path))
    assert found.of(100, 50_000) == pytest.approx(TRUTH.of(100, 50_000), rel=1e-3)


def test_the_lines_of_the_step_benchmark_are_understood(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    lines = [
        {
            "benchmark": "runner_steps",
            "batch": batch,
            "context": 576,
            "step_us": {"median": 1e6 * TRUTH.of(batch, 576 * batch), "each": []},
        }
        for batch in (1, 8, 32, 256)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    found = parse_step_time(str(path))
    assert found.of(128, 576 * 128) == pytest.approx(TRUTH.of(128, 576 * 128), rel=1e-3)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("0.01,2", "has 2 numbers"),
        ("0.01", "has 1 numbers"),
        ("0.01,x,0", "per_token_s is 'x'"),
        ("-1,0,0", "base_s is -1"),
        ("nowhere.json", "neither"),
    ],
)
def test_what_is_no_model_is_refused_by_name(text: str, problem: str) -> None:
    with pytest.raises(BadStepTime, match=problem):
        parse_step_time(text)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ('{"base_s": 1}', "no per_token_s"),
        ('[{"num_tokens": 1}]', "step 1: expected an object with"),
        ('[{"num_tokens": 1, "num_context_tokens": 0, "duration_s": 0.1}]', "too few to fit"),
        ('{"num_tokens": 1}\n{', "line 2"),
        ('{"benchmark": "runner_steps", "batch": 1, "context": 2}', "step 1 .* lacks 'step_us'"),
        ('{"benchmark": "startup", "cold_s": 1}', "'startup' is not runner_steps"),
    ],
)
def test_what_is_no_measurement_is_refused_by_place(
    tmp_path: Path, content: str, problem: str
) -> None:
    path = tmp_path / "steps.json"
    path.write_text(content)
    with pytest.raises(BadStepTime, match=problem):
        parse_step_time(str(path))
