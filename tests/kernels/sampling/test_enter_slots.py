"""Sequences written to their slots out of packed words."""

import numpy as np
import pytest
import torch

from kernels.sampling.enter_slots import enter_slots
from kernels.sampling.slot_state import NUM_FIELDS
from worker_svc.runner.device_slots import entering_words

NUM_SLOTS, LENGTH, WIDTH = 5, 5200, 9


def memory(device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token rows, block tables and numbers that hold something already."""
    tokens = torch.full((NUM_SLOTS, LENGTH), -5, dtype=torch.int32, device=device)
    tables = torch.full((NUM_SLOTS, WIDTH), -6, dtype=torch.int32, device=device)
    state = torch.full((NUM_SLOTS, NUM_FIELDS.value), -7, device=device)
    return tokens, tables, state


@pytest.mark.parametrize("count", [None, 0, 1, 3])
def test_rows_hold_what_enters_and_no_other_row_changes(
    count: int | None, device: torch.device
) -> None:
    random = np.random.default_rng(0)
    slots = np.array([3, -1, 0])
    token_ids = [random.integers(0, 99, n).astype(np.int32) for n in (5100, 4, 1)]
    block_ids = [random.integers(1, 99, n).astype(np.int32) for n in (9, 2, 1)]
    numbers = random.integers(-(2**62), 2**62, (3, NUM_FIELDS.value))
    words = torch.from_numpy(entering_words(slots, token_ids, block_ids, numbers)).to(device)
    tokens, tables, state = memory(device)
    expected = [rows.cpu().clone() for rows in memory(device)]
    for row in (0, 2) if count in (None, 3) else (0,) * count:
        slot = int(slots[row])
        expected[0][slot, : len(token_ids[row])] = torch.from_numpy(token_ids[row])
        expected[1][slot] = 0
        expected[1][slot, : len(block_ids[row])] = torch.from_numpy(block_ids[row])
        expected[2][slot] = torch.from_numpy(numbers[row])
    entering = None if count is None else torch.tensor([count], dtype=torch.int32, device=device)
    enter_slots(words, 3, tokens, tables, state, entering)
    for found, wanted in zip((tokens, tables, state), expected, strict=True):
        assert torch.equal(found.cpu(), wanted)


def test_each_of_several_tables_holds_its_blocks_and_null_blocks(device: torch.device) -> None:
    parts = [(0, 5), (5, 3), (8, 1)]
    entering = {3: [[1, 2, 3], [], [9]], 0: [[4, 5, 6, 7, 8], [10, 11, 12], []]}
    token_ids = [np.array([7], dtype=np.int32)] * 2
    block_ids = [
        np.array([*map(len, held), *(block for one in held for block in one)], dtype=np.int32)
        for held in entering.values()
    ]
    numbers = np.zeros((2, NUM_FIELDS.value), dtype=np.int64)
    slots = np.array(list(entering))
    words = torch.from_numpy(entering_words(slots, token_ids, block_ids, numbers)).to(device)
    rows = memory(device)
    columns = torch.tensor(parts, dtype=torch.int32, device=device)
    enter_slots(words, 2, *rows, None, columns)
    for slot in range(NUM_SLOTS):
        expected = [-6] * WIDTH
        for (begin, width), held in zip(parts, entering.get(slot, []), strict=False):
            expected[begin : begin + width] = held + [0] * (width - len(held))
        assert rows[1][slot].tolist() == expected
    with pytest.raises(TypeError, match="parts"):
        enter_slots(words, 2, *rows, None, columns.long())


def test_words_that_are_too_few_or_of_another_type_are_refused(device: torch.device) -> None:
    rows = memory(device)
    words = torch.zeros(23, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="23 words for 1 sequences"):
        enter_slots(words, 1, *rows)
    words = torch.zeros(24, dtype=torch.int32, device=device)
    with pytest.raises(TypeError, match="int32"):
        enter_slots(words.long(), 1, *rows)
    with pytest.raises(ValueError, match="slot_state"):
        enter_slots(words, 1, *rows[:2], rows[2][:, :4])
