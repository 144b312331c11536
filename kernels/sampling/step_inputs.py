# mypy: disable-error-code="untyped-decorator"
"""The inputs of a step of prompts and decodes, from what the slots hold, by its packed columns.

    columns of the step (`StepColumns`), token_rows [S, L], block_tables [S, W]
      ->  StepInputs of T tokens and B sequences, in place

Sequences are numbered in the order of their tokens, those that decode first. The grid depends on
shapes alone, so a captured CUDA graph serves every step that fits in them: tokens beyond the
step's are padding, which reads token 0 and writes no KV, and sequences beyond the step's have no
context. `gather_last` then takes what the last layer goes on with out of all tokens' rows.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.pdl import has_pdl, launch_options

# Places in `StepColumns.counts`.
NUM_TOKENS = tl.constexpr(0)
NUM_SEQUENCES = tl.constexpr(1)

_CHUNK = 256
_WIDEST_COPY = 1024


@dataclass(frozen=True, slots=True)
class StepColumns:
    """A step as the host describes it: int32, B sequences at most."""

    counts: torch.Tensor  # [2]: tokens and sequences
    num_decodes: torch.Tensor  # [1]: the leading sequences that compute their newest token
    slots: torch.Tensor  # [B]
    starts: torch.Tensor  # [B], the position of each sequence's first token
    firsts: torch.Tensor  # [B + 1], the first token of each sequence, and the end of the last


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The memory a graph of T tokens and B sequences reads."""

    token_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    slot_mapping: torch.Tensor  # [T] int64
    block_tables: torch.Tensor  # [B, W] int32; written as far as the context goes
    context_lens: torch.Tensor  # [B] int32
    decode_lens: torch.Tensor  # [B] int32: the same of sequences that decode; -1 of others
    last_rows: torch.Tensor  # [B] int32: where the last token of each sequence is

    @classmethod
    def empty(
        cls, num_tokens: int, num_sequences: int, num_blocks: int, device: torch.device
    ) -> "StepInputs":
        """Memory of its own, zeroed."""
        # One by one, since kernels are compiled for where columns begin.
        token_ids, positions, slot_mapping = (
            torch.zeros(num_tokens, dtype=torch.int64, device=device) for _ in range(3)
        )
        context_lens, decode_lens, last_rows = (
            torch.zeros(num_sequences, dtype=torch.int32, device=device) for _ in range(3)
        )
        tables = torch.zeros((num_sequences, num_blocks), dtype=torch.int32, device=device)
        return cls(token_ids, positions, slot_mapping, tables, context_lens, decode_lens, last_rows)

    def first(self, num_tokens: int) -> "StepInputs":
        """The first tokens, and all sequences, in the same memory."""
        return StepInputs(
            self.token_ids[:num_tokens],
            self.positions[:num_tokens],
            self.slot_mapping[:num_tokens],
            self.block_tables,
            self.context_lens,
            self.decode_lens,
            self.last_rows,
        )


def gather_step_inputs(
    columns: StepColumns,
    token_rows: torch.Tensor,
    block_tables: torch.Tensor,
    block_size: int,
    into: StepInputs,
) -> None:
    """Fill `into`."""
    num_tokens, num_sequences = len(into.token_ids), len(into.context_lens)
    if not token_rows.dtype == block_tables.dtype == columns.counts.dtype == torch.int32:
        raise TypeError("token_rows, block_tables and the columns must be int32")
    if len(columns.slots) != num_sequences or len(columns.firsts) != num_sequences + 1:
        raise ValueError(f"columns of {len(columns.slots)} sequences, inputs of {num_sequences}")
    if into.block_tables.shape[1] != block_tables.shape[1]:
        raise ValueError(f"tables of {block_tables.shape[1]} blocks, not {into.block_tables.shape}")
    for rows in (token_rows, block_tables, into.block_tables):
        if not rows.is_contiguous():
            raise ValueError("token_rows and block tables must be contiguous")
    _gather_step_kernel[(num_sequences + 1, triton.cdiv(num_tokens, _CHUNK))](
        columns.counts, columns.num_decodes, columns.slots, columns.starts, columns.firsts,
        token_rows, block_tables,
        into.token_ids, into.positions, into.slot_mapping, into.block_tables,
        into.context_lens, into.decode_lens, into.last_rows,
        num_tokens,
        token_rows.shape[1],
        block_tables.shape[1],
        BLOCK_SIZE=block_size,
        CHUNK=_CHUNK,
        num_warps=4,
    )  # fmt: skip


def gather_last(
    hidden: torch.Tensor,
    q: torch.Tensor,
    last_rows: torch.Tensor,
    hidden_into: torch.Tensor,
    q_into: torch.Tensor,
) -> None:
    """Rows [B] of hidden [T, N] and q [T, M], into the first B rows of others."""
    num_rows = len(last_rows)
    for rows, into in ((hidden, hidden_into), (q, q_into)):
        if rows.dim() != 2 or into.dim() != 2 or rows.shape[1] != into.shape[1]:
            raise ValueError(f"rows of {tuple(rows.shape)} into {tuple(into.shape)}")
        if not rows.is_contiguous() or not into.is_contiguous() or len(into) < num_rows:
            raise ValueError(f"{num_rows} rows into {tuple(into.shape)}; all must be contiguous")
        if rows.dtype != into.dtype:
            raise TypeError(f"rows of {rows.dtype} into {into.dtype}")
    widest = max(hidden.shape[1], q.shape[1])
    _gather_last_kernel[(num_rows, triton.cdiv(widest, _WIDEST_COPY))](
        hidden, q, last_rows, hidden_into, q_into, hidden.shape[1], q.shape[1],
        BLOCK=_WIDEST_COPY, PDL=has_pdl(hidden), num_warps=4, **launch_options(hidden),
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens"])
def _gather_step_kernel(
    counts_ptr: tl.tensor,
    num_decodes_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    firsts_ptr: tl.tensor,
    token_rows_ptr: tl.tensor,
    tables_ptr: tl.tensor,
    token_ids_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    slot_mapping_ptr: tl.tensor,
    tables_out_ptr: tl.tensor,
    context_lens_ptr: tl.tensor,
    decode_lens_ptr: tl.tensor,
    last_rows_ptr: tl.tensor,
    num_tokens: tl.tensor,  # of the graph
    stride_tokens: tl.tensor,
    stride_table: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """A program has a chunk of one sequence's tokens and blocks; the last row has the padding."""
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    num_sequences = tl.load(counts_ptr + NUM_SEQUENCES)
    i = chunk * CHUNK + tl.arange(0, CHUNK)
    if row < num_sequences:
        slot = tl.load(slots_ptr + row).to(tl.int64)
        start = tl.load(starts_ptr + row)
        first = tl.load(firsts_ptr + row)
        length = tl.load(firsts_ptr + row + 1) - first
        context = start + length
        inside = i < length
        positions = start + i
        table = tables_ptr + slot * stride_table
        tokens = tl.load(token_rows_ptr + slot * stride_tokens + positions, mask=inside, other=0)
        blocks = tl.load(table + positions // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        tl.store(token_ids_ptr + first + i, tokens.to(tl.int64), mask=inside)
        tl.store(positions_ptr + first + i, positions.to(tl.int64), mask=inside)
        slots = blocks * BLOCK_SIZE + positions % BLOCK_SIZE
        tl.store(slot_mapping_ptr + first + i, slots, mask=inside)
        num_blocks = tl.cdiv(context, BLOCK_SIZE)
        table_out = tables_out_ptr + row.to(tl.int64) * stride_table
        for begin in range(chunk * CHUNK, num_blocks, tl.num_programs(1) * CHUNK):
            b = begin + tl.arange(0, CHUNK)
            ids = tl.load(table + b, mask=b < num_blocks, other=0)
            tl.store(table_out + b, ids, mask=b < num_blocks)
        if chunk == 0:
            is_decode = row < tl.load(num_decodes_ptr)
            tl.store(context_lens_ptr + row, context)
            tl.store(decode_lens_ptr + row, tl.where(is_decode, context, -1))
            tl.store(last_rows_ptr + row, first + length - 1)
    elif row < tl.num_programs(0) - 1:
        if chunk == 0:
            tl.store(context_lens_ptr + row, 0)
            tl.store(decode_lens_ptr + row, -1)
            tl.store(last_rows_ptr + row, 0)
    else:
        is_padding = (i >= tl.load(counts_ptr + NUM_TOKENS)) & (i < num_tokens)
        nothing = tl.zeros([CHUNK], tl.int64)
        tl.store(token_ids_ptr + i, nothing, mask=is_padding)
        tl.store(positions_ptr + i, nothing, mask=is_padding)
        tl.store(slot_mapping_ptr + i, nothing - 1, mask=is_padding)


@triton.jit
def _gather_last_kernel(
    hidden_ptr: tl.tensor,
    q_ptr: tl.tensor,
    last_rows_ptr: tl.tensor,
    hidden_out_ptr: tl.tensor,
    q_out_ptr: tl.tensor,
    hidden_width: tl.tensor,
    q_width: tl.tensor,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    source = tl.load(last_rows_ptr + row).to(tl.int64)
    x = tl.load(hidden_ptr + source * hidden_width + i, mask=i < hidden_width, other=0.0)
    tl.store(hidden_out_ptr + row * hidden_width + i, x, mask=i < hidden_width)
    y = tl.load(q_ptr + source * q_width + i, mask=i < q_width, other=0.0)
    tl.store(q_out_ptr + row * q_width + i, y, mask=i < q_width)
