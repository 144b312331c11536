"""The inputs of a step of any rows, gathered from slots as its packed columns say."""

import math

import pytest
import torch

from kernels.sampling.step_inputs import StepColumns, StepInputs, gather_last, gather_step_inputs

# (slot, tokens computed already, tokens of this step); those in front decode.
STEPS = {
    "decodes and prompts": (2, [(3, 40, 1), (0, 16, 1), (5, 0, 30), (1, 33, 17), (2, 69, 1)]),
    "a prompt longer than a program's chunk": (0, [(4, 3, 300)]),
    "nothing but decodes": (3, [(0, 0, 1), (1, 15, 1), (2, 31, 1)]),
    "no rows": (0, []),
}
MAX_SEQUENCES, NUM_SLOTS, LENGTH = 7, 6, 330


def columns(num_decodes: int, rows: list[tuple[int, int, int]], device: torch.device):
    lengths = [length for _, _, length in rows]
    slots, starts, firsts = (torch.zeros(MAX_SEQUENCES + n, dtype=torch.int32) for n in (0, 0, 1))
    for i, (slot, start, length) in enumerate(rows):
        slots[i], starts[i], firsts[i + 1] = slot, start, firsts[i] + length
    counts = torch.tensor([sum(lengths), len(rows)], dtype=torch.int32)
    decodes = torch.tensor([num_decodes], dtype=torch.int32)
    return StepColumns(*(column.to(device) for column in (counts, decodes, slots, starts, firsts)))


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("more", [0, 13])
def test_every_token_reads_its_slot_and_padding_reads_nothing(
    name: str, block_size: int, more: int, device: torch.device
) -> None:
    num_decodes, rows = STEPS[name]
    generator = torch.Generator().manual_seed(0)
    width = -(-LENGTH // block_size)
    token_rows = torch.randint(0, 1000, (NUM_SLOTS, LENGTH), generator=generator).int()
    block_tables = torch.randint(1, 999, (NUM_SLOTS, width), generator=generator).int()
    size = max(1, sum(length for _, _, length in rows) + more)
    into = StepInputs.empty(size + 5, MAX_SEQUENCES, width, device)
    flat = (into.token_ids, into.positions, into.slot_mapping)
    for column in (*flat, into.context_lens, into.decode_lens, into.last_rows):
        column.fill_(-99)
    gather_step_inputs(
        columns(num_decodes, rows, device), token_rows.to(device), block_tables.to(device),
        block_size, into.first(size),
    )  # fmt: skip
    expected = []
    for i, (slot, start, length) in enumerate(rows):
        for at in range(start, start + length):
            block = int(block_tables[slot, at // block_size])
            expected.append([int(token_rows[slot, at]), at, block * block_size + at % block_size])
        end = start + length
        num_blocks = -(-end // block_size)
        table = into.block_tables[i, :num_blocks].cpu()
        assert torch.equal(table, block_tables[slot, :num_blocks])
        assert int(into.context_lens[i]) == end
        assert int(into.decode_lens[i]) == (end if i < num_decodes else -1)
        assert int(into.last_rows[i]) == len(expected) - 1
    expected += [[0, 0, -1]] * (size - len(expected)) + [[-99] * 3] * 5
    assert torch.stack(flat, 1).tolist() == expected
    idle = slice(len(rows), None)
    assert not into.context_lens[idle].any() and not into.last_rows[idle].any()
    assert (into.decode_lens[idle] == -1).all()


def test_columns_of_other_sizes_are_refused(device: torch.device) -> None:
    rows = torch.zeros((2, 8), dtype=torch.int32, device=device)
    given = columns(0, [], device)
    with pytest.raises(ValueError, match="columns of 7 sequences, inputs of 3"):
        gather_step_inputs(given, rows, rows, 4, StepInputs.empty(4, 3, 8, device))
    with pytest.raises(ValueError, match="tables of 8 blocks"):
        gather_step_inputs(given, rows, rows, 4, StepInputs.empty(4, MAX_SEQUENCES, 9, device))
    with pytest.raises(TypeError, match="int32"):
        gather_step_inputs(given, rows.long(), rows, 4, StepInputs.empty(4, 7, 8, device))


@pytest.mark.parametrize("widths", [(64, 96), (1500, 40)])
def test_last_rows_are_taken_and_no_others_written(
    widths: tuple[int, int], device: torch.device
) -> None:
    given = [torch.randn(9, width, device=device) for width in widths]
    into = [torch.full((6, width), math.nan, device=device) for width in widths]
    rows = torch.tensor([8, 0, 3, 3], dtype=torch.int32, device=device)
    gather_last(*given, rows, *into)
    for source, target in zip(given, into, strict=True):
        assert torch.equal(target[:4], source[rows.long()])
        assert target[4:].isnan().all()


def test_rows_of_other_widths_are_refused(device: torch.device) -> None:
    x, y = torch.zeros(3, 8, device=device), torch.zeros(3, 6, device=device)
    rows = torch.zeros(2, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="rows of"):
        gather_last(x, y, rows, y, x)
    with pytest.raises(ValueError, match="2 rows into"):
        gather_last(x, y, rows, x[:1], y)
    with pytest.raises(TypeError, match="float16"):
        gather_last(x, y, rows, x.half(), y)
