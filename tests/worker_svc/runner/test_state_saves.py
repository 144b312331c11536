"""Snapshots that slots are to make: which of them a step makes, and where in its rows."""

import numpy as np
import pytest
import torch

from tests.worker_svc.runner.test_batch_state import LIMITS, column, run, sequence
from worker_svc.protocol.step import BadStep, SaveRequest, StepInput
from worker_svc.runner.batch_state import BatchState
from worker_svc.runner.state_saves import DueSave, DueSaves
from worker_svc.sampling.grammars import Grammars


@pytest.fixture
def state() -> BatchState:
    return BatchState(LIMITS, torch.device("cpu"), Grammars(LIMITS.vocab_size))


def entered(state: BatchState, *saves: tuple[int, int, int]) -> DueSaves:
    """Slots 1 and 2 enter with 12 tokens each, of which 5 and 12 are computed."""
    new = tuple(sequence(slot, 12, [*range(4 * slot, 4 * slot + 4)]) for slot in (1, 2))
    step = StepInput(
        1,
        new_sequences=new,
        slots=column(1, 2),
        num_scheduled=column(5, 12),
        state_saves=tuple(SaveRequest(*save) for save in saves),
    )
    due = state.stage(step).state_saves
    run(state, step, [70])
    return due


def test_a_save_is_due_within_a_row_at_its_end_or_later(state: BatchState) -> None:
    due = entered(state, (1, 4, 7), (2, 4, 5), (2, 12, 6), (1, 8, 8))
    assert due.within == (DueSave(0, 1, 4, 7), DueSave(1, 2, 4, 5))
    assert due.at_ends == (DueSave(1, 2, 12, 6),)
    later = StepInput(2, slots=column(1), num_scheduled=column(3))
    assert state.stage(later).state_saves.at_ends == (DueSave(0, 1, 3, 8),)


def test_a_step_that_fails_leaves_its_saves_to_the_next(state: BatchState) -> None:
    entered(state, (1, 8, 8))
    step = StepInput(2, slots=column(1), num_scheduled=column(7))
    wanted = DueSaves(within=(DueSave(0, 1, 3, 8),))
    state.write(state.stage(step))
    state.rollback()
    assert state.stage(step).state_saves == wanted
    run(state, step, [71])
    assert state.stage(StepInput(3, slots=column(1))).state_saves == DueSaves()


def test_granted_steps_make_what_was_asked_with_the_first(state: BatchState) -> None:
    entered(state)
    grant = StepInput(2, slots=column(2), granted_steps=3, state_saves=(SaveRequest(2, 15, 4),))
    found = []
    for step in grant.steps():
        found.append(state.stage(step).state_saves.at_ends)
        run(state, step, [72])
    assert found == [(), (), (DueSave(0, 2, 1, 4),)]


def test_a_slot_that_is_freed_makes_none(state: BatchState) -> None:
    entered(state, (1, 8, 8))
    new = sequence(1, 12, [30, 31, 32])
    again = StepInput(
        2, freed_slots=column(1), new_sequences=(new,), slots=column(1), num_scheduled=column(12)
    )
    assert state.stage(again).state_saves == DueSaves()
    run(state, again, [73])


@pytest.mark.parametrize("position", [5, 3, 8])
def test_a_position_that_has_passed_or_is_due_twice_is_refused(
    state: BatchState, position: int
) -> None:
    entered(state, (1, 8, 8))
    saves = (SaveRequest(1, position, 9),)
    step = StepInput(2, slots=column(1), num_scheduled=column(1), state_saves=saves)
    with pytest.raises(BadStep, match=f"state_save_positions: {position} of slot 1 is not after 8"):
        state.stage(step)
    assert np.array_equal(state.table.live_slots, [1, 2])
