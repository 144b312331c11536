"""The slots' block tables of several KV groups against a plain model, under a random walk."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.worker_svc.runner.test_batch_state import LIMITS, column, run, sequence
from worker_svc.attention.batch import AttentionBatch
from worker_svc.protocol.kv_groups import LayerGroup
from worker_svc.protocol.step import BadStep, GroupBlocks, NewSequence, StepInput
from worker_svc.runner import inputs
from worker_svc.runner.batch_state import BatchState
from worker_svc.sampling.grammars import Grammars

SIZES = (4, 8, 4)  # tokens per block of each group
GROUPS = replace(LIMITS, kv_groups=(LayerGroup(4), LayerGroup(8), LayerGroup(4, window=6)))
CPU = torch.device("cpu")


@pytest.fixture
def state() -> BatchState:
    return BatchState(GROUPS, CPU, Grammars(GROUPS.vocab_size))


def with_tables(slot: int, num_tokens: int, *tables: list[int], **fields: object) -> NewSequence:
    others = tuple(np.array(table, dtype=np.int32) for table in tables[1:])
    return sequence(slot, num_tokens, tables[0], group_block_ids=others, **fields)


def held(state: BatchState, slot: int) -> list[list[int]]:
    """The tables of a slot, as many blocks as are counted."""
    first, *others = state.tables.parts
    counts = [state.table.columns["num_blocks"][slot], *state.table.other_blocks[:, slot]]
    row = state.block_tables[slot].tolist()
    return [
        row[part.begin : part.begin + count]
        for part, count in zip((first, *others), counts, strict=True)
    ]


def test_each_group_gains_blocks_in_its_own_table(state: BatchState) -> None:
    new = with_tables(1, 9, [1, 2, 3], [4, 5], [6, 7, 8])
    run(state, StepInput(1, new_sequences=(new,), slots=column(1), num_scheduled=column(9)), [77])
    step = StepInput(
        2,
        appended_slots=column(1),
        appended_block_ids=column(9),
        appended_to_groups=(
            GroupBlocks(1, column(1, 1), column(10, 11)),
            GroupBlocks(2, column(1), column(12)),
        ),
        same_rows=True,
        granted_steps=3,
    )
    run(state, step, [78])
    assert held(state, 1) == [[1, 2, 3, 9], [4, 5, 10, 11], [6, 7, 8, 12]]


def test_a_row_needs_room_in_all_groups(state: BatchState) -> None:
    new = with_tables(1, 9, [1, 2, 3], [4], [6, 7, 8])
    step = StepInput(1, new_sequences=(new,), slots=column(1), num_scheduled=column(9))
    with pytest.raises(BadStep, match="slot 1 has too few blocks of a group for its tokens"):
        state.stage(step)
    short = with_tables(1, 9, [1, 2, 3], [4], [6, 7, 8], num_computed_tokens=8)
    state.stage(StepInput(1, new_sequences=(short,)))
    with pytest.raises(BadStep, match=r"group_block_ids\[1\]: 2 blocks for 9 computed tokens of"):
        few = with_tables(1, 10, [1, 2, 3], [4, 5], [6, 7], num_computed_tokens=9)
        state.stage(StepInput(1, new_sequences=(few,)))
    with pytest.raises(BadStep, match="slot 2 is empty"):
        state.stage(StepInput(1, appended_to_groups=(GroupBlocks(1, column(2), column(9)),)))
    with pytest.raises(BadStep, match="slot 1 would hold 6 blocks, 5 hold max_model_len"):
        gained = GroupBlocks(1, column(*[1] * 5), column(*range(20, 25)))
        state.stage(StepInput(1, new_sequences=(short,), appended_to_groups=(gained,)))


def test_a_failed_step_leaves_no_trace_in_any_table(state: BatchState) -> None:
    run(state, StepInput(1, new_sequences=(with_tables(0, 9, [1, 2, 3], [4, 5], [6, 7, 8]),)))
    before, tables = state.block_tables.clone(), held(state, 0)
    step = StepInput(
        2,
        freed_slots=column(0),
        new_sequences=(with_tables(0, 3, [50], [51], [52]),),
        appended_to_groups=(GroupBlocks(2, column(0), column(53)),),
    )
    state.write(state.stage(step))
    assert not torch.equal(state.block_tables, before)
    state.rollback()
    assert torch.equal(state.block_tables, before)
    assert held(state, 0) == tables


class Walk:
    """Random steps, and what slots should hold after them."""

    def __init__(self) -> None:
        self.random = np.random.default_rng(0)
        self.tables: dict[int, list[list[int]]] = {}
        self.computed: dict[int, int] = {}

    def step(self, step_id: int) -> StepInput:
        """The next step: slots end and begin, tables of all groups grow, rows compute."""
        freed, new = self._end(), self._begin()
        gained = [self._grow(group) for group in range(len(SIZES))]
        rows = self._rows()
        return StepInput(
            step_id,
            freed_slots=column(*freed),
            new_sequences=tuple(new),
            appended_slots=gained[0].slots,
            appended_block_ids=gained[0].block_ids,
            appended_to_groups=tuple(one for one in gained[1:] if len(one.slots)),
            slots=column(*rows),
            num_scheduled=column(*rows.values()),
        )

    def _end(self) -> list[int]:
        freed = [s for s in self.tables if self.random.random() < 0.1 or self.computed[s] > 30]
        for slot in freed:
            del self.tables[slot], self.computed[slot]
        return freed

    def _begin(self) -> list[NewSequence]:
        new = []
        for slot in range(GROUPS.max_num_seqs):
            if slot in self.tables or self.random.random() > 0.3:
                continue
            tables = [self.random.integers(1, 100, 3).tolist() for _ in SIZES]
            self.tables[slot], self.computed[slot] = tables, int(self.random.integers(0, 8))
            new.append(with_tables(slot, 40, *tables, num_computed_tokens=self.computed[slot]))
        return new

    def _grow(self, group: int) -> GroupBlocks:
        slots, block_ids = [], []
        for slot in self.random.permutation(list(self.tables)).tolist():
            table = self.tables[slot][group]
            if len(table) * SIZES[group] < 40 and self.random.random() < 0.6:
                table.append(int(self.random.integers(1, 100)))
                slots.append(slot)
                block_ids.append(table[-1])
        return GroupBlocks(group, column(*slots), column(*block_ids))

    def _rows(self) -> dict[int, int]:
        rows = {}
        for slot in self.random.permutation(list(self.tables)).tolist():
            held = zip(self.tables[slot], SIZES, strict=True)
            room = min(40, *(len(table) * size for table, size in held)) - self.computed[slot]
            if room > 0 and self.random.random() < 0.8:
                rows[slot] = int(self.random.integers(1, room + 1))
        return rows

    def check(self, batch: AttentionBatch, step: StepInput) -> int:
        """Compares each group's batch with the tables; returns the number of tokens compared."""
        counts = dict(zip(step.slots.tolist(), step.num_scheduled.tolist(), strict=True))
        ends = {slot: self.computed[slot] + count for slot, count in counts.items()}
        places = [(s, p) for s, n in counts.items() for p in range(ends[s] - n, ends[s])]
        for group, size in enumerate(SIZES):
            of_group = batch.of_group(group)
            wanted = [self.tables[s][group][p // size] * size + p % size for s, p in places]
            assert of_group.slot_mapping.tolist() == wanted
            for row, slot in enumerate(counts):
                seen = -(-ends[slot] // size)
                found = of_group.block_tables[row, :seen].tolist()
                assert found == self.tables[slot][group][:seen]
        self.computed |= ends
        return len(places)


def test_the_tables_and_inputs_follow_a_plain_model_under_random_steps(state: BatchState) -> None:
    walk, num_compared = Walk(), 0
    for step_id in range(1, 300):
        step = walk.step(step_id)
        staged = state.stage(step)
        state.write(staged)
        if len(step.slots):
            num_compared += walk.check(inputs.build(state, staged.rows).attention, step)
        state.commit(staged)
        assert {slot: held(state, slot) for slot in walk.tables} == walk.tables
    assert num_compared > 1000
