"""The inputs of a decode step, gathered from slots."""

import pytest
import torch

from kernels.sampling.decode_inputs import DecodeInputs, gather_decode_inputs
from kernels.sampling.slot_state import NUM_FIELDS, NUM_TOKENS


@pytest.mark.parametrize("block_size", [4, 16])
def test_rows_read_their_slots_and_padding_reads_nothing(
    device: torch.device, block_size: int
) -> None:
    num_slots, length, width = 6, 70, -(-70 // block_size)
    generator = torch.Generator().manual_seed(0)
    token_rows = torch.randint(0, 1000, (num_slots, length), generator=generator).int()
    block_tables = torch.randint(1, 99, (num_slots, width), generator=generator).int()
    num_tokens = torch.tensor([1, block_size, block_size + 1, 33, 64, 70])
    slot_state = torch.full((num_slots, NUM_FIELDS.value), -7)
    slot_state[:, NUM_TOKENS.value] = num_tokens
    slots = torch.tensor([3, -1, 5, 0, 2, -1], dtype=torch.int32)
    num_steps = torch.tensor([41], dtype=torch.int32, device=device)
    into = DecodeInputs.empty(9, width, device)
    for column in (into.token_ids, into.positions, into.slot_mapping, into.context_lens):
        column.fill_(-99)
    gather_decode_inputs(
        slots.to(device), slot_state.to(device), token_rows.to(device), block_tables.to(device),
        block_size, num_steps, into.first(6),
    )  # fmt: skip
    assert num_steps.item() == 42
    for row, slot in enumerate(slots.tolist()):
        seen = [
            int(column[row])
            for column in (into.token_ids, into.positions, into.slot_mapping, into.context_lens)
        ]
        if slot < 0:
            assert seen == [0, 0, -1, 0]
            continue
        count = int(num_tokens[slot])
        blocks = block_tables[slot, : -(-count // block_size)]
        at = int(blocks[-1]) * block_size + (count - 1) % block_size
        assert seen == [int(token_rows[slot, count - 1]), count - 1, at, count]
        assert torch.equal(into.block_tables[row, : len(blocks)].cpu(), blocks)
    assert into.token_ids[6:].tolist() == [-99] * 3


def test_inputs_of_another_width_are_refused(device: torch.device) -> None:
    ints = torch.zeros((2, 5), dtype=torch.int32, device=device)
    state = torch.zeros((2, NUM_FIELDS.value), dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="for 1 rows"):
        gather_decode_inputs(
            ints[0, :1], state, ints, ints, 4, ints[0, :1], DecodeInputs.empty(1, 4, device)
        )
