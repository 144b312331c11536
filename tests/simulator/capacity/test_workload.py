"""Workloads: traces are read, or refused by line and field; generated ones follow their seed."""

from pathlib import Path

import numpy as np
import pytest

from simulator.capacity.workload import (
    Arrival,
    BadTrace,
    Prompts,
    Range,
    Synthetic,
    at_rate,
    rate_per_s,
    read_trace,
)


def synthetic(**fields: object) -> Synthetic:
    defaults = {"rate_per_s": 5.0, "num_requests": 400, "seed": 3}
    lengths = {"prompt_tokens": Range(10, 20), "output_tokens": Range(1, 3)}
    return Synthetic(**{**defaults, **lengths, **fields})  # type: ignore[arg-type]


def test_a_trace_is_read_in_the_order_of_arrival(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"arrival_s": 2, "prompt_tokens": 5, "output_tokens": 1, "tenant": "a"}\n\n'
        '{"arrival_s": 0.5, "prompt_tokens": 7, "output_tokens": 2, "prefix": "x", '
        '"prefix_tokens": 4, "priority": -1, "timeout_s": 3}\n'
    )
    assert read_trace(path) == [
        Arrival(0.5, 7, 2, priority=-1, timeout_s=3, prefix="x", prefix_tokens=4),
        Arrival(2, 5, 1, tenant="a"),
    ]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"arrival_s": 0, "prompt_tokens": 5}', "no output_tokens"),
        ('{"arrival_s": 0, "prompt_tokens": 0, "output_tokens": 1}', "prompt_tokens is 0"),
        ('{"arrival_s": -1, "prompt_tokens": 5, "output_tokens": 1}', "arrival_s is -1"),
        ('{"arrival_s": 0, "prompt_tokens": 5.5, "output_tokens": 1}', "prompt_tokens is 5.5"),
        ('{"arrival_s": 0, "prompt_tokens": true, "output_tokens": 1}', "prompt_tokens is True"),
        ('{"arrival_s": 0, "prompt_tokens": 5, "output_tokens": 1, "n": 2}', "unknown field 'n'"),
        (
            '{"arrival_s": 0, "prompt_tokens": 5, "output_tokens": 1, "prefix": "x"}',
            "come together",
        ),
        ("[1]", "expected an object"),
        ("{", "Expecting property name"),
    ],
)
def test_a_bad_line_is_refused_by_number_and_field(tmp_path: Path, line: str, problem: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"arrival_s": 0, "prompt_tokens": 5, "output_tokens": 1}\n' + line)
    with pytest.raises(BadTrace, match=r"line 2: ") as caught:
        read_trace(path)
    assert problem in str(caught.value)


def test_a_made_up_workload_has_the_rate_and_the_lengths_it_was_asked_for() -> None:
    arrivals = synthetic().arrivals()
    assert rate_per_s(arrivals) == pytest.approx(5.0, rel=0.15)
    assert {a.prompt_tokens for a in arrivals} == set(range(10, 21))
    assert {a.output_tokens for a in arrivals} == {1, 2, 3}
    assert arrivals == synthetic().arrivals() != synthetic(seed=4).arrivals()


def test_another_rate_keeps_the_requests_and_their_pattern() -> None:
    arrivals = synthetic().arrivals()
    faster = at_rate(arrivals, 50.0)
    assert rate_per_s(faster) == pytest.approx(50.0)
    assert [a.prompt_tokens for a in faster] == [a.prompt_tokens for a in arrivals]
    gaps, faster_gaps = (np.diff([a.arrival_s for a in some]) for some in (arrivals, faster))
    assert gaps / faster_gaps == pytest.approx(50.0 / rate_per_s(arrivals))


def test_prompts_are_equal_where_their_prefixes_are_and_nowhere_else() -> None:
    prompts = Prompts(vocab_size=32_000)
    long, short, other, alone = (
        prompts.of(Arrival(0, 100, 1, prefix=name, prefix_tokens=count))
        for name, count in (("x", 60), ("x", 40), ("y", 40), ("", 0))
    )
    assert len(long) == len(short) == 100
    assert (long[:40] == short[:40]).all() and not (long[40:60] == short[40:60]).all()
    assert not (other[:40] == short[:40]).all() and not (alone[:40] == short[:40]).all()


@pytest.mark.parametrize(
    "fields", [{"rate_per_s": 0.0}, {"num_requests": 0}, {"num_prefixes": 2, "prefix_tokens": 11}]
)
def test_a_workload_that_cannot_be_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        synthetic(**fields)
