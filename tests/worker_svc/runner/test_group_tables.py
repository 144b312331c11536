"""The slots' block tables of several KV groups against a plain model, under a random walk."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.worker_svc.runner.test_batch_state import LIMITS, column, run, sequence
from worker_svc.protocol.kv_groups import KvGroup
from worker_svc.protocol.step import AppendedBlocks, BadStep, NewSequence, StepInput
from worker_svc.runner import inputs
from worker_svc.runner.batch_state import BatchState
from worker_svc.sampling.grammars import Grammars

SIZES = (4, 8, 4)  # tokens per block of each group
GROUPS = replace(LIMITS, kv_groups=(KvGroup(4), KvGroup(8), KvGroup(4, window=6)))
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
            AppendedBlocks(1, column(1, 1), column(10, 11)),
            AppendedBlocks(2, column(1), column(12)),
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
        state.stage(StepInput(1, appended_to_groups=(AppendedBlocks(1, column(2), column(9)),)))
    with pytest.raises(BadStep, match="slot 1 would hold 6 blocks, 5 hold max_model_len"):
        gained = AppendedBlocks(1, column(*[1] * 5), column(*range(20, 25)))
        state.stage(StepInput(1, new_sequences=(short,), appended_to_groups=(gained,)))


def test_a_failed_step_leaves_no_trace_in_any_table(state: BatchState) -> None:
    run(state, StepInput(1, new_sequences=(with_tables(0, 9, [1, 2, 3], [4, 5], [6, 7, 8]),)))
    before, tables = state.block_tables.clone(), held(state, 0)
    step = StepInput(
        2,
        freed_slots=column(0),
        new_sequences=(with_tables(0, 3, [50], [51], [52]),),
        appended_to_groups=(AppendedBlocks(2, column(0), column(53)),),
    )
    state.write(state.stage(step))
    assert not torch.equal(state.block_tables, before)
    state.rollback()
    assert torch.equal(state.block_tables, before)
    assert held(state, 0) == tables


def test_the_tables_and_inputs_follow_a_plain_model_under_random_steps(state: BatchState) -> None:
    random = np.random.default_rng(0)
    tables: dict[int, list[list[int]]] = {}
    computed: dict[int, int] = {}
    num_checked = 0
    for step_id in range(1, 300):
        freed = [slot for slot in tables if random.random() < 0.1 or computed[slot] > 30]
        for slot in freed:
            del tables[slot], computed[slot]
        new = []
        for slot in range(GROUPS.max_num_seqs):
            if slot not in tables and random.random() < 0.3:
                tables[slot] = [random.integers(1, 100, 3).tolist() for _ in SIZES]
                computed[slot] = int(random.integers(0, 8))
                new.append(with_tables(slot, 40, *tables[slot], num_computed_tokens=computed[slot]))
        gained: list[tuple[list[int], list[int]]] = [([], []) for _ in SIZES]
        for group, size in enumerate(SIZES):
            for slot in random.permutation(list(tables)).tolist():
                if len(tables[slot][group]) * size < 40 and random.random() < 0.6:
                    tables[slot][group].append(int(random.integers(1, 100)))
                    gained[group][0].append(slot)
                    gained[group][1].append(tables[slot][group][-1])
        rows = {}
        for slot in random.permutation(list(tables)).tolist():
            room = min(len(table) * size for table, size in zip(tables[slot], SIZES, strict=True))
            room = min(room, 40) - computed[slot]
            if room > 0 and random.random() < 0.8:
                rows[slot] = int(random.integers(1, room + 1))
        step = StepInput(
            step_id,
            freed_slots=column(*freed),
            new_sequences=tuple(new),
            appended_slots=column(*gained[0][0]),
            appended_block_ids=column(*gained[0][1]),
            appended_to_groups=tuple(
                AppendedBlocks(group, column(*slots), column(*ids))
                for group, (slots, ids) in enumerate(gained)
                if group and slots
            ),
            slots=column(*rows),
            num_scheduled=column(*rows.values()),
        )
        staged = state.stage(step)
        state.write(staged)
        if rows:
            batch = inputs.build(state, staged.rows).attention
            places = [(s, p) for s, n in rows.items() for p in range(computed[s], computed[s] + n)]
            for group, size in enumerate(SIZES):
                wanted = [tables[s][group][p // size] * size + p % size for s, p in places]
                assert batch.of_group(group).slot_mapping.tolist() == wanted
                num_checked += len(wanted)
                for row, slot in enumerate(rows):
                    seen = -(-(computed[slot] + rows[slot]) // size)
                    found = batch.of_group(group).block_tables[row, :seen].tolist()
                    assert found == tables[slot][group][:seen]
        state.commit(staged)
        for slot in rows:
            computed[slot] += rows[slot]
        assert {slot: held(state, slot) for slot in tables} == tables
    assert num_checked > 3000
