"""The slots' state against a plain model of it, under a random walk of deltas."""

import numpy as np
import pytest
import torch

from worker_svc.protocol.step import BadStep, Limits, NewSequence, RowSampling, StepInput
from worker_svc.runner.batch_state import BatchState
from worker_svc.sampling.grammars import Grammars

LIMITS = Limits(
    num_blocks=100,
    block_size=4,
    max_num_seqs=6,
    max_num_batched_tokens=64,
    max_model_len=40,
    vocab_size=1000,
)


def column(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def sequence(slot: int, num_tokens: int, block_ids: list[int], **fields: object) -> NewSequence:
    defaults: dict[str, object] = {
        "slot": slot,
        "request_id": f"request-{slot}",
        "token_ids": np.arange(num_tokens, dtype=np.int32),
        "num_prompt_tokens": num_tokens,
        "num_computed_tokens": 0,
        "block_ids": np.array(block_ids, dtype=np.int32),
    }
    return NewSequence(**(defaults | fields))


def run(state: BatchState, step: StepInput, tokens: list[int] | None = None) -> list[int]:
    """A step whose rows sample the tokens given; returns the slots that sampled."""
    staged = state.stage(step)
    state.write(staged)
    sampled = staged.rows.slots[staged.rows.samples]
    if tokens is not None:
        state.write_sampled(staged.rows, torch.tensor(tokens))
    state.commit(staged)
    return sampled.tolist()


@pytest.fixture
def state() -> BatchState:
    return BatchState(LIMITS, torch.device("cpu"), Grammars(LIMITS.vocab_size))


def test_a_row_samples_only_when_it_reaches_its_last_known_token(state: BatchState) -> None:
    new = sequence(2, 10, [1, 2, 3])
    step = StepInput(1, new_sequences=(new,), slots=column(2), num_scheduled=column(6))
    assert run(state, step) == []
    assert run(state, StepInput(2, slots=column(2), num_scheduled=column(4)), [77]) == [2]
    assert run(state, StepInput(3, same_rows=True), [88]) == [2]
    assert state.token_rows[2, 9:12].tolist() == [9, 77, 88]
    assert state.table.columns[2]["num_tokens"] == 12
    assert state.table.columns[2]["num_computed"] == 11


def test_deltas_apply_in_the_documented_order(state: BatchState) -> None:
    run(state, StepInput(1, new_sequences=(sequence(0, 3, [1]), sequence(1, 3, [2]))))
    # A slot freed by a step may be filled, grow and compute in that same step.
    step = StepInput(
        2,
        freed_slots=column(0),
        new_sequences=(sequence(0, 6, [5]),),
        appended_slots=column(0),
        appended_block_ids=column(6),
        slots=column(0),
        num_scheduled=column(6),
    )
    assert run(state, step, [50]) == [0]
    assert state.block_tables[0, :3].tolist() == [5, 6, 0]
    run(state, StepInput(3, reset=True, new_sequences=(sequence(1, 2, [9]),)))
    assert state.table.live_slots.tolist() == [1]


def test_blocks_of_a_repeated_slot_are_appended_in_order(state: BatchState) -> None:
    new = (sequence(0, 1, [1]), sequence(3, 1, [2, 3]))
    step = StepInput(
        1,
        new_sequences=new,
        appended_slots=column(3, 0, 3, 0, 3),
        appended_block_ids=column(10, 11, 12, 13, 14),
    )
    run(state, step)
    assert state.block_tables[3, :6].tolist() == [2, 3, 10, 12, 14, 0]
    assert state.block_tables[0, :4].tolist() == [1, 11, 13, 0]
    assert state.table.columns["num_blocks"].tolist() == [3, 0, 0, 5, 0, 0]


def test_a_new_occupant_sees_nothing_of_the_old_one(state: BatchState) -> None:
    run(state, StepInput(1, new_sequences=(sequence(0, 30, [1, 2, 3, 4, 5, 6, 7, 8]),)))
    run(state, StepInput(2, freed_slots=column(0), new_sequences=(sequence(0, 2, [9]),)))
    assert state.block_tables[0].tolist() == [9] + [0] * 9
    assert state.table.columns[0]["num_tokens"] == 2


def test_sampling_rows_carry_position_seed_and_masks(state: BatchState) -> None:
    sampling = RowSampling(temperature=0.5, seed=(1 << 64) - 1, min_tokens=3, stop_token_ids=(7, 9))
    resumed = sequence(4, 6, [1, 2], num_prompt_tokens=4, sampling=sampling)
    done = sequence(1, 6, [3, 4], num_prompt_tokens=2, sampling=sampling)
    step = StepInput(
        1,
        new_sequences=(resumed, done, sequence(0, 9, [5])),
        slots=column(0, 1, 4),
        num_scheduled=column(2, 6, 6),
    )
    rows = state.sampling_rows(state.stage(step))
    assert rows.output_position.tolist() == [4, 2]
    assert rows.seed.tolist() == [-1, -1]
    assert rows.temperature.tolist() == [0.5, 0.5]
    masked = rows.logits_processors.masked
    assert list(zip(masked.rows, masked.ids, strict=True)) == [(1, 7), (1, 9)]


def test_staging_alone_changes_nothing(state: BatchState) -> None:
    run(state, StepInput(1, new_sequences=(sequence(0, 5, [1, 2]),)))
    before = state.table.columns.copy()
    state.stage(StepInput(2, freed_slots=column(0), new_sequences=(sequence(1, 5, [3, 4]),)))
    assert (state.table.columns == before).all()
    assert state.table.live_slots.tolist() == [0]


def test_a_rollback_restores_what_new_sequences_overwrote(state: BatchState) -> None:
    run(state, StepInput(1, new_sequences=(sequence(0, 30, list(range(1, 9))),)))
    tokens, blocks = state.token_rows.clone(), state.block_tables.clone()
    shorter = sequence(0, 3, [50], token_ids=np.array([9, 9, 9], dtype=np.int32))
    staged = state.stage(StepInput(2, freed_slots=column(0), new_sequences=(shorter,)))
    state.write(staged)
    assert not torch.equal(state.token_rows, tokens)
    state.rollback()
    assert torch.equal(state.token_rows, tokens)
    assert torch.equal(state.block_tables, blocks)
    with pytest.raises(BadStep, match="same_rows"):
        state.stage(StepInput(3, same_rows=True))


def assert_holds(
    state: BatchState,
    tokens: dict[int, list[int]],
    blocks: dict[int, list[int]],
    computed: dict[int, int],
) -> None:
    """The state has these tokens, blocks and computed tokens, by slot, and no other slots."""
    assert state.table.live_slots.tolist() == sorted(tokens)
    for slot in tokens:
        assert state.token_rows[slot, : len(tokens[slot])].tolist() == tokens[slot]
        padded = blocks[slot] + [0] * (LIMITS.max_blocks_per_seq - len(blocks[slot]))
        assert state.block_tables[slot].tolist() == padded
        assert state.table.columns[slot]["num_computed"] == computed[slot]


def test_the_state_follows_a_plain_model_under_random_steps(state: BatchState) -> None:
    random = np.random.default_rng(0)
    tokens: dict[int, list[int]] = {}
    blocks: dict[int, list[int]] = {}
    computed: dict[int, int] = {}
    for step_id in range(1, 400):
        freed = [slot for slot in tokens if random.random() < 0.1 or len(tokens[slot]) >= 38]
        for slot in freed:
            del tokens[slot], blocks[slot], computed[slot]
        new = []
        for slot in range(LIMITS.max_num_seqs):
            if slot not in tokens and random.random() < 0.3:
                tokens[slot] = random.integers(0, 1000, random.integers(1, 12)).tolist()
                blocks[slot] = random.integers(1, 100, 3).tolist()
                computed[slot] = int(random.integers(0, len(tokens[slot])))
                new.append(
                    sequence(
                        slot,
                        len(tokens[slot]),
                        blocks[slot],
                        token_ids=np.array(tokens[slot], dtype=np.int32),
                        num_computed_tokens=computed[slot],
                    )
                )
        grows = [slot for slot in tokens if len(blocks[slot]) < 10 and random.random() < 0.7]
        grown = random.integers(1, 100, len(grows)).tolist()
        for slot, block_id in zip(grows, grown, strict=True):
            blocks[slot].append(block_id)
        rows = {}
        for slot in random.permutation(list(tokens)).tolist():
            room = min(len(tokens[slot]), 4 * len(blocks[slot])) - computed[slot]
            if room > 0 and random.random() < 0.8:
                rows[slot] = int(random.integers(1, room + 1))
        step = StepInput(
            step_id,
            freed_slots=column(*freed),
            new_sequences=tuple(new),
            appended_slots=column(*grows),
            appended_block_ids=column(*grown),
            slots=column(*rows),
            num_scheduled=column(*rows.values()),
        )
        samples = [s for s in rows if computed[s] + rows[s] == len(tokens[s])]
        drawn = random.integers(0, 1000, len(samples)).tolist()
        assert run(state, step, drawn) == samples
        for slot in rows:
            computed[slot] += rows[slot]
        for slot, token_id in zip(samples, drawn, strict=True):
            tokens[slot].append(token_id)
        assert_holds(state, tokens, blocks, computed)
