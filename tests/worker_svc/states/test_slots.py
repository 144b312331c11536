"""States by slot: a failed step leaves them as they were, and sequences do not mix."""

import numpy as np
import pytest
import torch

from worker_svc.states.slots import SlotStates, StateKey, StateShape, row_bytes

KEY = StateKey(0, "recurrent", 0)


def states_of(num_slots: int, num_snapshots: int = 0) -> SlotStates:
    shapes = {KEY: StateShape((2,), torch.float32)}
    return SlotStates(shapes, num_slots, torch.device("cpu"), num_snapshots)


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


def test_a_snapshot_is_what_a_slot_held_and_another_begins_with_it() -> None:
    states = states_of(3, num_snapshots=2)
    write(states, {0: [1.0, 2.0], 1: [3.0, 4.0]})
    states.save({0: 2, 1: 1})
    states.commit(np.array([0, 1]))
    write(states, {0: [9.0, 9.0]})
    states.commit(np.array([0]))
    states.restore({2: 2, 0: 1})
    assert [read(states, slot) for slot in range(3)] == [[3, 4], [3, 4], [1, 2]]
    write(states, {2: [5.0, 6.0], 0: [7.0, 8.0]})
    states.commit(np.array([2, 0]))
    assert [read(states, slot) for slot in range(3)] == [[7, 8], [3, 4], [5, 6]]


def test_a_failed_step_begins_after_no_snapshot() -> None:
    states = states_of(2, num_snapshots=1)
    write(states, {0: [1.0, 2.0], 1: [3.0, 4.0]})
    states.commit(np.array([0, 1]))
    states.save({1: 1})
    states.restore({0: 1})
    states.rollback()
    assert [read(states, slot) for slot in range(2)] == [[1, 2], [3, 4]]
    states.restore({0: 1})
    write(states, {0: [5.0, 6.0]})
    states.rollback()
    assert [read(states, slot) for slot in range(2)] == [[1, 2], [3, 4]]


def test_states_of_several_types_and_sizes_lie_in_one_row() -> None:
    shapes = {
        StateKey(0, "recurrent", 0): StateShape((3, 1), torch.float32),
        StateKey(0, "conv", 0): StateShape((5,), torch.bfloat16),
        StateKey(1, "recurrent", 0): StateShape((2, 2), torch.float32),
    }
    states = SlotStates(shapes, 2, torch.device("cpu"), num_snapshots=1)
    drawn = {k: torch.randn(1, *s.shape).to(s.dtype) for k, s in shapes.items()}
    states.write(torch.tensor([1]), drawn)
    states.save({1: 1})
    states.restore({0: 1})
    found = states.read(torch.tensor([0]), torch.tensor([False]))
    assert all(torch.equal(found[key], drawn[key]) for key in shapes)
    states.keep(1, {key: value + 1 for key, value in drawn.items()})
    found = states.read(torch.tensor([0]), torch.tensor([False]))
    assert all(torch.equal(found[key], drawn[key] + 1) for key in shapes)
    assert row_bytes(shapes) == 16 + 16 + 16


NUM_SLOTS, NUM_SNAPSHOTS, PRIME = 5, 4, 1009
NUM_ACTIONS = 8_000  # with 20,000 states


def followed(state: int, token: int) -> int:
    """A state that depends on all tokens in their order."""
    return (state * 31 + token + 1) % PRIME


def drawn_actions(states: SlotStates, num_actions: int) -> int:
    """Random steps of random slots, some of which fail; how many states were wrong at the end."""
    random = np.random.default_rng(7)
    expected: list[int | None] = [None] * NUM_SLOTS  # None: no token yet
    kept: dict[int, int] = {}  # by snapshot
    num_wrong = 0
    for _ in range(num_actions):
        slots = np.flatnonzero(random.random(NUM_SLOTS) < 0.5)
        if not len(slots):
            slots = np.array([int(random.integers(NUM_SLOTS))])
        begins = dict(enumerate(expected))
        given = {}
        for slot in slots.tolist():
            if random.random() < 0.05:  # the slot's next sequence
                begins[slot] = None
                if kept and random.random() < 0.5:
                    given[slot] = int(random.choice(list(kept)))
                    begins[slot] = kept[given[slot]]
        if given:
            states.restore(given)
        tokens = random.integers(1000, size=len(slots)).tolist()
        is_first = torch.tensor([begins[slot] is None for slot in slots.tolist()])
        before = states.read(torch.from_numpy(slots), is_first)[KEY][:, 0].tolist()
        after = [followed(int(state), token) for state, token in zip(before, tokens, strict=True)]
        states.write(torch.from_numpy(slots), {KEY: torch.tensor([[s, 0.0] for s in after])})
        saves = {}
        if random.random() < 0.1:
            saves = {int(random.choice(slots)): int(random.integers(1, NUM_SNAPSHOTS + 1))}
            states.save(saves)
            kept = {n: state for n, state in kept.items() if n not in saves.values()}
        if random.random() < 0.2:
            states.rollback()
            continue
        states.commit(slots)
        for slot, token in zip(slots.tolist(), tokens, strict=True):
            expected[slot] = followed(begins[slot] or 0, token)
            if slot in saves:
                kept[saves[slot]] = expected[slot] or 0
        num_wrong += after != [expected[slot] for slot in slots]
    return num_wrong


def test_random_steps_give_each_sequence_the_state_of_its_own_tokens() -> None:
    assert drawn_actions(states_of(NUM_SLOTS, NUM_SNAPSHOTS), NUM_ACTIONS) == 0


@pytest.mark.parametrize("method", ["rollback", "commit", "restore", "save"])
def test_a_planted_bug_is_found(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    monkeypatch.setattr(SlotStates, method, lambda *_: None)
    assert drawn_actions(states_of(NUM_SLOTS, NUM_SNAPSHOTS), 1000) > 0
