"""A short run against real processes: nothing ends, nothing is internal, all is named."""

import asyncio

import pytest

from bench.fuzz.__main__ import TARGETS, fuzz

NUM_CASES, SEED = 100, 1
KNOWN = "Error parsing message"  # of messages that do not parse, as long as they are UNKNOWN


@pytest.mark.slow
def test_no_process_ends_and_each_refusal_names_its_field() -> None:
    report = asyncio.run(fuzz(TARGETS, NUM_CASES, SEED))
    assert not report.deaths, str(report)
    assert not [what for _, what in report.problems if KNOWN not in what], str(report)
    assert {name: counts.total() >= NUM_CASES for name, counts in report.statuses.items()} == (
        dict.fromkeys(TARGETS, True)
    )
