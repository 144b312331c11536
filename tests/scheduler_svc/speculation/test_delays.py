"""Each row's account of what drafts cost it and brought it."""

from dataclasses import replace

import numpy as np
import pytest

from scheduler_svc.speculation.answered_step import AnsweredStep
from scheduler_svc.speculation.delays import SHARE, Delays, StepEffect
from scheduler_svc.speculation.prices import StepPrices
from tests.scheduler_svc.worker.test_pace import plan_of

PRICES = StepPrices(plain_s=6.0, row_s=1.0, fixed_s=4.0, wait_s=1.0, draft_s=1.0)
ROWS = np.array([0, 1])
PLAIN = replace(
    plan_of(1),
    num_prefill_tokens=0,
    slots=ROWS.astype(np.int32),
    sampled_slots=ROWS.astype(np.int32),
)
DRAFTED = replace(PLAIN, drafts={0: np.array([7, 8, 9], dtype=np.int32)})


def effect(step: AnsweredStep, accepted: int = 0, has_waited: bool = False) -> StepEffect:
    return StepEffect(step, ROWS, {0: accepted} if accepted else {}, PRICES, has_waited)


def drafted(period_s: float, accepted: int) -> StepEffect:
    return effect(AnsweredStep(DRAFTED, 9.0, period_s, 2 + accepted), accepted)


def late_s(delays: Delays, age_s: float) -> list[float]:
    return [float(SHARE * age_s - left) for left in delays.left_s(ROWS)]


def test_a_step_without_drafts_leaves_a_share_of_its_time() -> None:
    delays = Delays(4)
    delays.stepped(effect(AnsweredStep(PLAIN, 6.0, 6.5, 2)))
    assert delays.left_s(ROWS).tolist() == pytest.approx([SHARE * 6.0] * 2)
    assert delays.left_s(np.array([2, 3])).tolist() == [0.0, 0.0]


def test_refused_drafts_and_the_wait_are_lost_to_all_rows() -> None:
    delays = Delays(4)
    delays.stepped(drafted(10.0, accepted=0))
    assert late_s(delays, 9.0) == pytest.approx([4.0, 4.0])


def test_accepted_drafts_are_work_done_and_bring_their_row_a_step_each() -> None:
    delays = Delays(4)
    delays.stepped(drafted(10.0, accepted=3))
    assert late_s(delays, 9.0) == pytest.approx([1.0 - 3 * 4.0, 1.0])


def test_a_disturbed_step_counts_twice_at_most() -> None:
    delays = Delays(4)
    delays.stepped(drafted(500.0, accepted=0))
    assert late_s(delays, 9.0) == pytest.approx([2 * 10.0 - 6.0] * 2)


def test_a_step_with_prompts_counts_as_drafts_usually_cost() -> None:
    delays = Delays(4)
    step = AnsweredStep(replace(DRAFTED, num_prefill_tokens=100), 9.0, 90.0, 2)
    delays.stepped(effect(step))
    assert late_s(delays, 9.0) == pytest.approx([4.0, 4.0])


def test_the_wait_before_a_step_is_lost_only_if_it_was_for_drafts() -> None:
    delays = Delays(4)
    step = AnsweredStep(PLAIN, 6.0, 8.0, 2)
    delays.stepped(effect(step))
    assert late_s(delays, 6.0) == pytest.approx([0.0, 0.0])
    delays.stepped(effect(step, has_waited=True))
    assert late_s(delays, 12.0) == pytest.approx([2.0, 2.0])


def test_time_in_which_nothing_was_computed_is_no_credit() -> None:
    """An idle hour ends with a step with a prompt, whose time since the last answer is an hour."""
    delays = Delays(4)
    prompt = replace(PLAIN, num_prefill_tokens=100)
    delays.stepped(effect(AnsweredStep(prompt, 20.0, 3600.0, 2), has_waited=True))
    assert delays.left_s(ROWS).tolist() == pytest.approx([SHARE * 20.0] * 2)


def test_another_request_in_the_slot_begins_anew() -> None:
    delays = Delays(4)
    delays.stepped(drafted(10.0, accepted=3))
    delays.begin(0)
    assert delays.left_s(np.array([0])).tolist() == [0.0]
