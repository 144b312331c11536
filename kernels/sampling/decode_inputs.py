# mypy: disable-error-code="untyped-decorator"
"""The inputs of a decode step, from what the slots hold: each row computes its slot's newest token.

    slots [B], slot_state [S, NUM_FIELDS], token_rows [S, L], block_tables [S, W]
      ->  DecodeInputs of B rows, in place

A negative slot is padding: its row reads token 0, writes no KV and has no context. Also counts the
step, so that a captured graph knows which one it runs.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.sampling.slot_state import NUM_FIELDS, NUM_TOKENS


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """One row per sequence; the memory a graph reads."""

    token_ids: torch.Tensor  # [B] int64
    positions: torch.Tensor  # [B] int64
    slot_mapping: torch.Tensor  # [B] int64
    block_tables: torch.Tensor  # [B, W] int32; written as far as the context goes
    context_lens: torch.Tensor  # [B] int32

    @classmethod
    def empty(cls, num_rows: int, num_blocks: int, device: torch.device) -> "DecodeInputs":
        token_ids, positions, slot_mapping = torch.zeros(
            (3, num_rows), dtype=torch.int64, device=device
        )
        block_tables = torch.zeros((num_rows, num_blocks), dtype=torch.int32, device=device)
        context_lens = torch.zeros(num_rows, dtype=torch.int32, device=device)
        return cls(token_ids, positions, slot_mapping, block_tables, context_lens)

    def first(self, num_rows: int) -> "DecodeInputs":
        """The first rows, in the same memory."""
        return DecodeInputs(
            self.token_ids[:num_rows],
            self.positions[:num_rows],
            self.slot_mapping[:num_rows],
            self.block_tables[:num_rows],
            self.context_lens[:num_rows],
        )


def gather_decode_inputs(
    slots: torch.Tensor,
    slot_state: torch.Tensor,
    token_rows: torch.Tensor,
    block_tables: torch.Tensor,
    block_size: int,
    num_steps: torch.Tensor,
    into: DecodeInputs,
) -> None:
    """Fill `into` and add one to `num_steps` [1]."""
    batch = slots.shape[0]
    if slot_state.shape[1] != NUM_FIELDS.value or slot_state.dtype != torch.int64:
        raise ValueError(f"slot_state must be int64 [S, {NUM_FIELDS.value}]")
    if not slots.dtype == token_rows.dtype == block_tables.dtype == num_steps.dtype == torch.int32:
        raise TypeError("slots, token_rows, block_tables and num_steps must be int32")
    if into.token_ids.shape != (batch,) or into.block_tables.shape[1] != block_tables.shape[1]:
        raise ValueError(f"inputs of {tuple(into.block_tables.shape)} for {batch} rows")
    for rows in (slot_state, token_rows, block_tables, into.block_tables):
        if not rows.is_contiguous():
            raise ValueError("slot_state, token_rows and block tables must be contiguous")
    _gather_kernel[(batch,)](
        slots, slot_state, token_rows, block_tables, num_steps,
        into.token_ids, into.positions, into.slot_mapping, into.block_tables, into.context_lens,
        token_rows.shape[1],
        block_tables.shape[1],
        BLOCK_SIZE=block_size,
        FIELDS=NUM_FIELDS.value,
        NUM_TOKENS_AT=NUM_TOKENS.value,
        CHUNK=256,
        num_warps=4,
    )  # fmt: skip


@triton.jit
def _gather_kernel(
    slots_ptr: tl.tensor,
    state_ptr: tl.tensor,
    token_rows_ptr: tl.tensor,
    tables_ptr: tl.tensor,
    num_steps_ptr: tl.tensor,
    token_ids_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    slot_mapping_ptr: tl.tensor,
    tables_out_ptr: tl.tensor,
    context_lens_ptr: tl.tensor,
    stride_tokens: tl.tensor,
    stride_table: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    FIELDS: tl.constexpr,
    NUM_TOKENS_AT: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    if row == 0:
        tl.store(num_steps_ptr, tl.load(num_steps_ptr) + 1)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    if slot < 0:
        tl.store(token_ids_ptr + row, 0)
        tl.store(positions_ptr + row, 0)
        tl.store(slot_mapping_ptr + row, -1)
        tl.store(context_lens_ptr + row, 0)
    else:
        num_tokens = tl.load(state_ptr + slot * FIELDS + NUM_TOKENS_AT)
        position = num_tokens - 1
        table = tables_ptr + slot * stride_table
        block = tl.load(table + position // BLOCK_SIZE).to(tl.int64)
        token = tl.load(token_rows_ptr + slot * stride_tokens + position)
        tl.store(token_ids_ptr + row, token.to(tl.int64))
        tl.store(positions_ptr + row, position)
        tl.store(slot_mapping_ptr + row, block * BLOCK_SIZE + position % BLOCK_SIZE)
        tl.store(context_lens_ptr + row, num_tokens.to(tl.int32))
        num_blocks = (position // BLOCK_SIZE + 1).to(tl.int32)
        for first in range(0, num_blocks, CHUNK):
            i = first + tl.arange(0, CHUNK)
            ids = tl.load(table + i, mask=i < num_blocks, other=0)
            tl.store(tables_out_ptr + row * stride_table + i, ids, mask=i < num_blocks)
