"""A step's overhead: the time between two ends minus the step's own time."""

import pytest

from bench.step_overhead import UNSETTLED, settled, to_result


def steps(num_rows: list[int], period_s: float = 0.0025) -> list[dict[str, float]]:
    return [
        {
            "step_id": number,
            "num_rows": rows,
            "num_tokens": rows,
            "ended_s": number * period_s,
            "bytes_in": 10 * (number % 2),
            "bytes_out": 100,
        }
        for number, rows in enumerate(num_rows)
    ]


def test_only_steps_in_which_everybody_decodes_count() -> None:
    kept = settled(steps([3] * 20 + [8] * 300 + [7] * 5), num_requests=8)
    assert (kept[0]["step_id"], len(kept)) == (20 + UNSETTLED, 300 - 2 * UNSETTLED)


@pytest.mark.parametrize("rows", [[8] * 150, [8] * 200 + [7] + [8] * 200])
def test_too_few_steps_or_a_gap_are_no_measurement(rows: list[int]) -> None:
    with pytest.raises(RuntimeError, match="in a row"):
        settled(steps(rows), num_requests=8)


def test_the_overhead_is_what_a_period_has_beyond_the_step() -> None:
    result = to_result("any", steps([8] * 101), step_time_s=0.002, cpu_us=70.0)
    assert (result.median_ms, result.p90_ms) == (0.5, 0.5)
    assert result.bytes_down == 100 and 4 < result.bytes_up < 6
