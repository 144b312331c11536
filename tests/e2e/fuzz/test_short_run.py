"""A short run against real processes: nothing ends, nothing is internal, all is named."""

import asyncio

import pytest

from tests.e2e.fuzz.__main__ import TARGETS, fuzz

NUM_CASES, SEED = 40, 1


@pytest.mark.slow
def test_no_process_ends_and_each_refusal_names_its_field() -> None:
    report = asyncio.run(fuzz(TARGETS, NUM_CASES, SEED))
    assert report.is_clean, str(report)
    assert {name: counts.total() >= NUM_CASES for name, counts in report.statuses.items()} == (
        dict.fromkeys(TARGETS, True)
    )
