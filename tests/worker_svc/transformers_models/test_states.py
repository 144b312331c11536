"""States by slot: a failed step leaves them as they were, and sequences do not mix."""

import numpy as np
import torch

from worker_svc.transformers_models.states import RECURRENT, SlotStates, StateKey, StateShape

KEY = StateKey(0, RECURRENT, 0)


def states_of(num_slots: int) -> SlotStates:
    return SlotStates({KEY: StateShape((2,), torch.float32)}, num_slots, torch.device("cpu"))


def read(states: SlotStates, slot: int) -> list[float]:
    return states.read(torch.tensor([slot]), torch.tensor([False]))[KEY][0].tolist()


def write(states: SlotStates, rows: dict[int, list[float]]) -> None:
    states.write(torch.tensor(list(rows)), {KEY: torch.tensor(list(rows.values()))})


def test_a_step_that_failed_is_undone_and_one_that_worked_is_not() -> None:
    states = states_of(3)
    write(states, {2: [1.0, 2.0], 0: [3.0, 4.0]})
    states.commit(np.array([2, 0]))
    write(states, {2: [9.0, 9.0], 1: [9.0, 9.0]})
    states.rollback()
    assert [read(states, slot) for slot in range(3)] == [[3, 4], [0, 0], [1, 2]]
    write(states, {2: [5.0, 6.0]})
    states.commit(np.array([2]))
    write(states, {0: [9.0, 9.0]})
    states.rollback()
    assert [read(states, slot) for slot in range(3)] == [[3, 4], [0, 0], [5, 6]]


def test_steps_in_a_row_each_read_what_the_one_before_wrote() -> None:
    states = states_of(1)
    for number in range(1, 6):
        assert read(states, 0)[0] == number - 1
        write(states, {0: [float(number), 0.0]})
        states.commit(np.array([0]))


def test_a_class_that_writes_in_place_changes_a_copy() -> None:
    states = states_of(1)
    states.read(torch.tensor([0]), torch.tensor([False]))[KEY].fill_(7)
    assert read(states, 0) == [0, 0]


def test_a_sequence_begins_with_zeros_whatever_its_slot_held() -> None:
    states = states_of(2)
    write(states, {0: [1.0, 1.0], 1: [1.0, 1.0]})
    both = states.read(torch.tensor([0, 1]), torch.tensor([True, False]))[KEY]
    assert both.tolist() == [[0, 0], [1, 1]]


def test_padding_has_a_place_of_its_own() -> None:
    states = states_of(2)
    slots = torch.tensor([1, -1, -1], dtype=torch.int32)
    states.write(slots, {KEY: torch.tensor([[1.0, 1.0], [8.0, 8.0], [9.0, 9.0]])})
    states.commit(np.array([1]))
    assert [read(states, slot) for slot in range(2)] == [[0, 0], [1, 1]]
    states.rollback()
    assert [read(states, slot) for slot in range(2)] == [[0, 0], [1, 1]]
