"""The arithmetic of `pagewire bench`."""

import pytest

from pagewire import Usage
from pagewire.cli.load import Sample, Spread, percentile, spread, summarize


@pytest.mark.parametrize(("share", "value"), [(0.0, 1.0), (0.5, 3.0), (0.9, 4.6), (1.0, 5.0)])
def test_percentiles_interpolate(share, value):
    assert percentile([1.0, 2.0, 3.0, 4.0, 5.0], share) == pytest.approx(value)


def test_one_value_is_every_percentile_and_none_is_zero():
    assert spread([7.0]) == Spread(7.0, 7.0, 7.0, 7.0)
    assert spread([]) == Spread(0.0, 0.0, 0.0, 0.0)


def test_rates_are_over_the_whole_run_and_tpot_leaves_the_first_arrival_out():
    summary = summarize(
        [
            Sample(10.0, 10.1, 10.5, 1, Usage(prompt_tokens=8, completion_tokens=5)),
            Sample(10.5, 10.8, 12.0, 2, Usage(prompt_tokens=8, completion_tokens=5)),
            Sample(11.0, 11.0, 11.0, 0, Usage(), failure="no"),
        ]
    )
    assert (summary.num_finished, summary.num_failed, summary.failure) == (2, 1, "no")
    assert summary.elapsed_s == pytest.approx(2.0)
    assert summary.requests_per_s == pytest.approx(1.0)
    assert summary.output_tokens_per_s == pytest.approx(5.0)
    assert summary.total_tokens_per_s == pytest.approx(13.0)
    assert summary.ttft_ms.mean == pytest.approx(200.0)
    assert summary.tpot_ms.p50 == pytest.approx((100.0 + 400.0) / 2)
