"""What steps take is learned from those that were answered, with drafts and without."""

from dataclasses import replace

import numpy as np
import pytest

from scheduler_svc.speculation.answered_step import AnsweredStep
from scheduler_svc.speculation.prices import Prices, StepPrices
from tests.scheduler_svc.worker.test_pace import plan_of

PLAIN = replace(plan_of(1), num_prefill_tokens=0)


def step(num_rows: int, seconds: float, num_drafts: int = 0, wait_s: float = 0.0) -> AnsweredStep:
    slots = np.arange(num_rows, dtype=np.int32)
    drafts = {0: np.zeros(num_drafts, dtype=np.int32)} if num_drafts else {}
    plan = replace(PLAIN, slots=slots, sampled_slots=slots, drafts=drafts)
    return AnsweredStep(plan, seconds, seconds + wait_s, num_rows)


def observe(prices: Prices, *steps: AnsweredStep, has_waited: bool = False) -> Prices:
    for one in steps:
        prices.observe(one, has_waited)
    return prices


def of(prices: Prices, num_rows: int) -> StepPrices:
    found = prices.of(num_rows)
    assert found is not None
    return found


def test_nothing_is_known_before_a_step_without_drafts() -> None:
    assert observe(Prices(), step(4, 1.0, num_drafts=3)).of(4) is None


def test_a_row_takes_what_steps_of_more_rows_take_longer() -> None:
    prices = of(observe(Prices(), step(1, 4.0), step(64, 6.3)), 64)
    assert prices.plain_s == 6.3
    assert prices.row_s == pytest.approx(2.3 / 63)
    assert prices.fixed_s == pytest.approx(6.3 - 64 * 2.3 / 63)
    assert prices.drafted_s(10) == pytest.approx(6.3 + 10 * prices.row_s), "as if they were rows"


def test_steps_of_nearly_as_many_rows_do_not_say_what_a_row_takes() -> None:
    assert of(observe(Prices(), step(60, 6.0), step(64, 6.3)), 64).row_s == 0.0


def test_the_wait_and_each_draft_are_told_apart_once_their_numbers_differ() -> None:
    prices = observe(Prices(), step(1, 4.0), step(64, 6.3))
    for number in range(200):
        num_drafts = 20 + number % 5 * 40
        observe(prices, step(64, 6.3 + 0.05 * num_drafts, num_drafts, wait_s=0.9))
    found = of(prices, 64)
    assert found.draft_s == pytest.approx(0.05, rel=0.02)
    assert found.wait_s == pytest.approx(0.9, rel=0.1)


def test_one_disturbed_step_among_others_changes_little() -> None:
    prices = observe(Prices(), step(1, 4.0), *[step(1, 5.5, num_drafts=7)] * 50)
    observe(prices, step(1, 1000.0, num_drafts=7))
    assert of(prices, 1).drafted_s(7) < 6.0


def test_a_disturbed_first_step_with_drafts_does_not_end_them() -> None:
    prices = observe(Prices(), step(1, 4.0), step(1, 1000.0, num_drafts=7))
    assert of(prices, 1).drafted_s(7) == pytest.approx(4.0)
    observe(prices, *[step(1, 5.5, num_drafts=7)] * 2)
    assert of(prices, 1).drafted_s(7) == pytest.approx(5.5)


def test_what_was_not_measured_for_long_is_tried_again() -> None:
    prices = observe(Prices(), step(1, 4.0), *[step(1, 1000.0, num_drafts=7)] * 3)
    assert of(prices, 1).drafted_s(7) > 900
    observe(prices, *[step(1, 4.0)] * 2000)
    assert of(prices, 1).drafted_s(7) == pytest.approx(4.0)


def test_a_step_that_waited_for_drafts_sake_took_its_own_time() -> None:
    prices = observe(Prices(), step(8, 4.0))
    observe(prices, *[step(8, 4.0, wait_s=1.0)] * 50, has_waited=True)
    assert of(prices, 8).plain_s == pytest.approx(4.0)
    observe(prices, *[step(8, 4.0, wait_s=1.0)] * 50)
    assert of(prices, 8).plain_s > 4.9


def test_steps_without_drafts_are_measured_again() -> None:
    prices = observe(Prices(), step(1, 4.0), *[step(1, 5.0, num_drafts=7)] * 99)
    assert not prices.is_stale
    assert observe(prices, step(1, 5.0, num_drafts=7)).is_stale
    assert not observe(prices, step(1, 4.0)).is_stale
