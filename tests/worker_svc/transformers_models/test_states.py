"""States by slot: a failed step leaves them as they were, and sequences do not mix."""

import torch

from worker_svc.transformers_models.states import RECURRENT, SlotStates, StateKey, StateShape

KEY = StateKey(0, RECURRENT, 0)


def states_of(num_slots: int) -> SlotStates:
    return SlotStates({KEY: StateShape((2,), torch.float32)}, num_slots, torch.device("cpu"))


def read(states: SlotStates, slot: int) -> list[float]:
    return states.read(torch.tensor([slot]), torch.tensor([False]))[KEY][0].tolist()


def test_a_step_counts_once_it_has_worked() -> None:
    states = states_of(3)
    states.leave(torch.tensor([2, 0]), {KEY: torch.tensor([[1.0, 2.0], [3.0, 4.0]])})
    assert read(states, 2) == [0, 0]
    states.commit()
    assert (read(states, 2), read(states, 1), read(states, 0)) == ([1, 2], [0, 0], [3, 4])
    states.leave(torch.tensor([2]), {KEY: torch.tensor([[9.0, 9.0]])})
    states.rollback()
    states.commit()
    assert read(states, 2) == [1, 2]


def test_a_class_that_writes_in_place_changes_a_copy() -> None:
    states = states_of(1)
    states.read(torch.tensor([0]), torch.tensor([False]))[KEY].fill_(7)
    assert read(states, 0) == [0, 0]


def test_a_sequence_begins_with_zeros_whatever_its_slot_held() -> None:
    states = states_of(2)
    states.leave(torch.tensor([0, 1]), {KEY: torch.ones(2, 2)})
    states.commit()
    both = states.read(torch.tensor([0, 1]), torch.tensor([True, False]))[KEY]
    assert both.tolist() == [[0, 0], [1, 1]]
