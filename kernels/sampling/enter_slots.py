# mypy: disable-error-code="untyped-decorator"
"""Sequences enter their slots: tokens, block tables and numbers, out of one packed buffer.

    words [W] int32  ->  token_rows [S, L], block_tables [S, B], slot_state [S, NUM_FIELDS]

The words begin with `HEADER_WORDS` for each sequence: its slot, where its tokens begin and how many
they are, the same of its blocks, and its row of `slot_state`. The rest of its table is filled with
the null block. A negative slot enters nothing. In a graph the device says how many sequences enter.

A row of `block_tables` may be parted into several tables. Then a sequence's blocks are those of one
table after the other, and before them stand their numbers.
"""

import torch
import triton
import triton.language as tl

from kernels.sampling.slot_state import NUM_FIELDS

_SLOT = tl.constexpr(0)
_TOKENS_AT = tl.constexpr(1)
_NUM_TOKENS = tl.constexpr(2)
_BLOCKS_AT = tl.constexpr(3)
_NUM_BLOCKS = tl.constexpr(4)
_STATE_AT = tl.constexpr(8)
STATE_AT = _STATE_AT.value
STATE_WORDS = 2 * NUM_FIELDS.value
HEADER_WORDS = STATE_AT + STATE_WORDS

_CHUNK = 1024
_PROGRAMS = 4  # to a sequence


def enter_slots(
    words: torch.Tensor,
    most: int,
    token_rows: torch.Tensor,
    block_tables: torch.Tensor,
    slot_state: torch.Tensor,
    count: torch.Tensor | None = None,
    parts: torch.Tensor | None = None,
) -> None:
    """Writes the rows of the slots named in the first `most` headers, or `count` [1] of these.

    `parts` [tables, 2] int32 are the first column and the width of each table; None: one has all.
    """
    if slot_state.shape[1] != NUM_FIELDS.value or slot_state.dtype != torch.int64:
        raise ValueError(f"slot_state must be int64 [S, {NUM_FIELDS.value}]")
    if not words.dtype == token_rows.dtype == block_tables.dtype == torch.int32:
        raise TypeError("words, token_rows and block_tables must be int32")
    for rows in (words, token_rows, block_tables, slot_state):
        if not rows.is_contiguous():
            raise ValueError("words, token_rows, block_tables and slot_state must be contiguous")
    if parts is not None and (parts.dtype != torch.int32 or not parts.is_contiguous()):
        raise TypeError("parts must be int32 and contiguous")
    if len(words) < most * HEADER_WORDS:
        raise ValueError(f"{len(words)} words for {most} sequences")
    width = block_tables.shape[1]
    _enter_kernel[(most, _PROGRAMS)](
        words, count, token_rows, block_tables, slot_state.view(torch.int32), parts,
        token_rows.shape[1], width,
        HEADER=HEADER_WORDS, STATE_LEN=STATE_WORDS, CHUNK=_CHUNK, COUNTS=count is not None,
        NUM_TABLES=1 if parts is None else len(parts),
        num_warps=4,
    )  # fmt: skip


@triton.jit
def _enter_kernel(
    words_ptr: tl.tensor,
    count_ptr: tl.tensor,
    token_rows_ptr: tl.tensor,
    tables_ptr: tl.tensor,
    state_ptr: tl.tensor,
    parts_ptr: tl.tensor,
    stride_tokens: tl.tensor,
    width: tl.tensor,
    HEADER: tl.constexpr,
    STATE_LEN: tl.constexpr,
    CHUNK: tl.constexpr,
    COUNTS: tl.constexpr,
    NUM_TABLES: tl.constexpr,
) -> None:
    """The programs of a sequence share its chunks."""
    row = tl.program_id(0)
    header = words_ptr + row * HEADER
    slot = tl.load(header + _SLOT).to(tl.int64)
    if COUNTS:
        slot = tl.where(row < tl.load(count_ptr), slot, -1)
    if slot >= 0:
        begin = tl.program_id(1) * CHUNK
        step = tl.num_programs(1) * CHUNK
        num_tokens = tl.load(header + _NUM_TOKENS)
        tokens = words_ptr + tl.load(header + _TOKENS_AT)
        for first in range(begin, num_tokens, step):
            i = first + tl.arange(0, CHUNK)
            token_ids = tl.load(tokens + i, mask=i < num_tokens, other=0)
            tl.store(token_rows_ptr + slot * stride_tokens + i, token_ids, mask=i < num_tokens)
        num_blocks = tl.load(header + _NUM_BLOCKS)
        blocks = words_ptr + tl.load(header + _BLOCKS_AT)
        if NUM_TABLES == 1:
            for first in range(begin, width, step):
                i = first + tl.arange(0, CHUNK)
                ids = tl.load(blocks + i, mask=i < num_blocks, other=0)
                tl.store(tables_ptr + slot * width + i, ids, mask=i < width)
        else:
            ids_ptr = blocks + NUM_TABLES
            for table in tl.static_range(NUM_TABLES):
                num_blocks = tl.load(blocks + table)
                row_ptr = tables_ptr + slot * width + tl.load(parts_ptr + 2 * table)
                table_width = tl.load(parts_ptr + 2 * table + 1)
                for first in range(begin, table_width, step):
                    i = first + tl.arange(0, CHUNK)
                    ids = tl.load(ids_ptr + i, mask=i < num_blocks, other=0)
                    tl.store(row_ptr + i, ids, mask=i < table_width)
                ids_ptr += num_blocks
        if tl.program_id(1) == 0:
            word = tl.arange(0, STATE_LEN)
            tl.store(state_ptr + slot * STATE_LEN + word, tl.load(header + _STATE_AT + word))
