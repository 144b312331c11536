"""Expectations of a limit from a step, by the steps that were measured."""

import pytest

from wire.step_pace import StepPace


def test_nothing_is_expected_before_anything_was_measured() -> None:
    assert StepPace().expected_s(512) is None


def test_a_step_is_expected_to_take_what_its_like_took() -> None:
    pace = StepPace()
    pace.observe(1, 0.1)
    pace.observe(300, 4.0)
    assert pace.expected_s(1) == 0.1
    assert pace.expected_s(300) == 4.0
    assert pace.expected_s(450) == pytest.approx(6.0), "larger, though of the same size class"


def test_a_size_that_was_not_seen_takes_no_longer_than_a_larger_one() -> None:
    pace = StepPace()
    pace.observe(1, 0.1)
    pace.observe(16, 0.5)
    pace.observe(512, 8.0)
    assert pace.expected_s(9) == 0.5
    assert pace.expected_s(100) == 8.0


def test_beyond_the_largest_seen_the_time_grows_in_proportion() -> None:
    pace = StepPace()
    pace.observe(64, 2.0)
    assert pace.expected_s(512) == pytest.approx(16.0)


def test_a_slow_step_is_remembered_however_many_of_another_size_follow() -> None:
    pace = StepPace()
    pace.observe(512, 40.0)
    for _ in range(10_000):
        pace.observe(1, 0.05)
    assert pace.expected_s(512) == 40.0
    assert pace.expected_s(1) == 0.05


def test_a_slow_step_counts_for_less_with_each_quick_one_like_it() -> None:
    pace = StepPace()
    pace.observe(512, 40.0)
    for _ in range(60):
        pace.observe(512, 1.0)
    assert pace.expected_s(512) == pytest.approx(1.0)
