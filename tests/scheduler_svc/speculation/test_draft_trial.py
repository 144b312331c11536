"""Drafts are made while they bring more tokens a second; what a step took says nothing alone."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from scheduler_svc.core.step.plan import StepPlan
from scheduler_svc.speculation.draft_trial import AnsweredStep, DraftTrial
from tests.scheduler_svc.worker.test_pace import plan_of

PLAIN_S, ROWS = 0.010, 64
PLAIN = replace(plan_of(1), num_prefill_tokens=0)
DRAFTED = replace(PLAIN, drafts={0: np.array([7, 8], dtype=np.int32)})


def stepped(
    trial: DraftTrial, num_steps: int, drafted_s: Callable[[int], float], rows: int = ROWS
) -> list[bool]:
    """Whether each step had drafts, of which two more tokens a row come."""
    told = []
    for number in range(num_steps):
        has_drafts = trial.allows(rows)
        plan = DRAFTED if has_drafts else PLAIN
        seconds = drafted_s(number) if has_drafts else PLAIN_S
        tokens = rows * (3 if has_drafts else 1)
        # What is awaited between two steps is no part of either's duration.
        trial.stepped(AnsweredStep(plan, 0.001, seconds, tokens), rows)
        told.append(has_drafts)
    return told


def test_drafts_that_pay_go_on_but_for_a_measurement_now_and_then() -> None:
    told = stepped(DraftTrial(), 2000, lambda _: 0.02)
    assert not all(told[:30]), "there was nothing to compare with"
    assert sum(told) > 0.95 * len(told)


def test_drafts_that_do_not_pay_are_tried_ever_more_rarely() -> None:
    told = stepped(DraftTrial(), 4000, lambda _: 0.04)
    assert 0 < sum(told[:200]) < 100
    assert 0 < sum(told[2000:]) < 0.03 * 2000


def test_drafts_are_taken_up_again_where_they_begin_to_pay() -> None:
    trial = DraftTrial()
    stepped(trial, 1000, lambda _: 0.04)
    assert sum(stepped(trial, 2000, lambda _: 0.02)[1000:]) > 900


def test_batches_of_other_sizes_are_measured_apart() -> None:
    trial = DraftTrial()
    stepped(trial, 1000, lambda _: 0.04)
    assert not trial.allows(ROWS + 3) and trial.allows(1) and trial.allows(2 * ROWS)


def test_where_nothing_is_foreseen_nothing_is_learned() -> None:
    """Steps without drafts, although they were allowed: the watching goes on."""
    trial = DraftTrial()
    for _ in range(500):
        trial.stepped(AnsweredStep(PLAIN, PLAIN_S, PLAIN_S, ROWS), ROWS)
        assert trial.allows(ROWS)


@pytest.mark.parametrize("changed", [{"num_prefill_tokens": 5}, {"reset": True}])
def test_a_stretch_with_other_work_does_not_count(changed: dict[str, object]) -> None:
    trial = DraftTrial()
    other: StepPlan = replace(DRAFTED, **changed)  # type: ignore[arg-type]
    for number in range(500):
        plan = other if number % 8 == 0 else DRAFTED
        trial.stepped(AnsweredStep(plan, PLAIN_S, PLAIN_S, ROWS), ROWS)
        assert trial.allows(ROWS)
