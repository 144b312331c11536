"""Tokens with keys and values in a draft model's cache, through all that moves blocks."""

from dataclasses import replace

import numpy as np

from tests.worker_svc.runner.test_drafts import column
from worker_svc.protocol.step import Limits, NewSequence, StepInput, StepMoves
from worker_svc.runner.filled_blocks import FilledBlocks

LIMITS = Limits(
    num_blocks=20,
    block_size=4,
    max_num_seqs=4,
    max_num_batched_tokens=16,
    max_model_len=40,
    vocab_size=64,
    num_host_blocks=4,
)


def table(*blocks: int) -> np.ndarray:
    return np.array([blocks], dtype=np.int32)


def filled_up_to(end: int, *blocks: int) -> FilledBlocks:
    filled = FilledBlocks(LIMITS)
    filled.fill(table(*blocks), column(0), column(end))
    return filled


def entering(num_computed: int, *blocks: int) -> StepInput:
    sequence = NewSequence(
        slot=0,
        request_id="a",
        token_ids=np.zeros(num_computed + 1, dtype=np.int32),
        num_prompt_tokens=num_computed + 1,
        num_computed_tokens=num_computed,
        block_ids=np.array(blocks, dtype=np.int32),
    )
    return StepInput(1, new_sequences=(sequence,))


def count(filled: FilledBlocks, *blocks: int) -> int:
    return int(filled.num_filled(table(*blocks))[0])


def moves(**pairs: tuple[int, int]) -> StepMoves:
    none = column()
    names = ("swapped_out", "to_host", "from_host", "swapped_in", "copied_from", "copied_to")
    fields = dict.fromkeys(names, none)
    for name, value in pairs.items():
        first, second = name.split("__")
        fields[first], fields[second] = column(value[0]), column(value[1])
    return StepMoves(**fields)


def test_what_was_filled_counts_up_to_the_first_gap() -> None:
    filled = filled_up_to(10, 3, 5, 7)
    assert count(filled, 3, 5, 7) == 10
    assert count(filled, 3, 5, 9) == 8
    assert count(filled, 5, 9, 7) == 4
    assert count(filled, 9, 3, 5) == 0


def test_a_shared_prefix_stays_filled_and_new_blocks_are_empty() -> None:
    filled = filled_up_to(12, 3, 5, 7)
    filled.apply(entering(8, 3, 5, 7))
    assert count(filled, 3, 5, 7) == 8
    filled.apply(StepInput(2, appended_slots=column(0), appended_block_ids=column(5)))
    assert count(filled, 3, 5, 7) == 4


def test_a_copied_block_is_filled_as_far_as_both_have_the_same_tokens() -> None:
    filled = filled_up_to(8, 3, 5)
    copying = replace(entering(6, 3, 9), moves=moves(copied_from__copied_to=(5, 9)))
    filled.apply(copying)
    assert count(filled, 3, 9) == 6 and count(filled, 3, 5) == 8


def test_swapped_blocks_keep_what_they_hold() -> None:
    filled = filled_up_to(7, 3, 5)
    filled.apply(StepInput(1, moves=moves(swapped_out__to_host=(5, 2))))
    filled.apply(StepInput(2, appended_slots=column(0), appended_block_ids=column(5)))
    assert count(filled, 3, 5) == 4
    filled.apply(replace(entering(7, 3, 8), moves=moves(from_host__swapped_in=(2, 8))))
    assert count(filled, 3, 8) == 7


def test_a_reset_empties_all_blocks_but_the_null_block() -> None:
    filled = filled_up_to(7, 3, 5)
    filled.apply(StepInput(1, reset=True))
    assert count(filled, 3, 5) == 0 and count(filled, 0, 3) == 4
