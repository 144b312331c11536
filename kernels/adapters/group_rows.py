# mypy: disable-error-code="untyped-decorator"
"""The rows of a step by their adapters, found on the device from the slots of its sequences.

    slots [B], slot_state [S, NUM_FIELDS]  ->  RowGroups of T rows

A row is a sequence, or with `columns` a token of one. Rows of a slot below 0, of none and of no
adapter are in no tile. The grids depend on shapes alone, so a captured graph serves every step.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.adapters.stacks import RowGroups
from kernels.sampling.slot_state import ADAPTER, NUM_FIELDS

FEW_ROWS = 256  # up to which a tile has the fewest rows that tensor cores multiply
_FEW, _MANY = 16, 64  # rows of a tile
_BLOCK = 128
_MOST_PAIRS = 8192  # of a row and an adapter that a program compares at once


class TokenColumns(NamedTuple):
    """A step's tokens as its columns say them, int32; see `kernels.sampling.step_inputs`."""

    counts: torch.Tensor  # [2]: tokens and sequences, at most B
    firsts: torch.Tensor  # [B + 1], the first token of each sequence


def num_tiles(num_rows: int, num_adapters: int) -> int:
    """Tiles that so many rows need at most."""
    return min(num_rows, num_rows // tile_rows(num_rows) + num_adapters)


def tile_rows(num_rows: int) -> int:
    """Rows of a tile."""
    return _FEW if num_rows <= FEW_ROWS else _MANY


def group_rows(
    slots: torch.Tensor,
    slot_state: torch.Tensor,
    num_adapters: int,
    num_rows: int,
    columns: TokenColumns | None = None,
) -> RowGroups:
    """Groups rows [T], which are the first sequences, or the tokens of sequences by `columns`."""
    if slot_state.shape[1] != NUM_FIELDS.value or slot_state.dtype != torch.int64:
        raise ValueError(f"slot_state must be int64 [S, {NUM_FIELDS.value}]")
    if slots.dtype != torch.int32 or not slots.is_contiguous():
        raise TypeError("slots must be int32 and contiguous")
    if columns is None and num_rows > len(slots):
        raise ValueError(f"{num_rows} rows, slots of {len(slots)}")
    device, count = slots.device, num_tiles(num_rows, num_adapters)
    adapters = torch.empty(num_rows, dtype=torch.int32, device=device)
    order = torch.empty(num_rows, dtype=torch.int32, device=device)
    tiles = torch.empty((count, 3), dtype=torch.int32, device=device)
    _adapters_kernel[(triton.cdiv(num_rows, _BLOCK),)](
        slots, slot_state,
        None if columns is None else columns.counts,
        None if columns is None else columns.firsts,
        adapters, num_rows,
        FIELDS=NUM_FIELDS.value, FIELD=ADAPTER.value,
        BY_TOKEN=columns is not None, BLOCK=_BLOCK, CHUNK=16,
        num_warps=4,
    )  # fmt: skip
    padded = max(2, triton.next_power_of_2(num_adapters))
    block = max(1, min(_BLOCK, _MOST_PAIRS // padded))
    _group_kernel[(1,)](
        adapters, order, tiles, num_rows, count,
        TILE=tile_rows(num_rows), ADAPTERS=padded, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return RowGroups(order, tiles, tile_rows(num_rows))


@triton.jit(do_not_specialize=["num_rows"])
def _adapters_kernel(
    slots_ptr: tl.tensor,
    state_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    firsts_ptr: tl.tensor,
    adapters_ptr: tl.tensor,
    num_rows: tl.tensor,
    FIELDS: tl.constexpr,
    FIELD: tl.constexpr,
    BY_TOKEN: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """The place of each row's adapter; -1: it has none."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < num_rows
    sequence = row
    if BY_TOKEN:
        # A token is of the last sequence that begins before it or with it.
        sequence = tl.full((BLOCK,), -1, tl.int32)
        number = tl.load(counts_ptr + 1)
        for begin in range(0, number, CHUNK):
            i = begin + tl.arange(0, CHUNK)
            first = tl.load(firsts_ptr + i, mask=i < number, other=0x7FFFFFFF)
            sequence += tl.sum((first[None, :] <= row[:, None]).to(tl.int32), 1)
        inside &= (row < tl.load(counts_ptr)) & (sequence >= 0)
    slot = tl.load(slots_ptr + sequence, mask=inside, other=-1).to(tl.int64)
    place = tl.load(state_ptr + slot * FIELDS + FIELD, mask=slot >= 0, other=0)
    tl.store(adapters_ptr + row, (place - 1).to(tl.int32), mask=row < num_rows)


@triton.jit(do_not_specialize=["num_rows", "num_tiles"])
def _group_kernel(
    adapters_ptr: tl.tensor,
    order_ptr: tl.tensor,
    tiles_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_tiles: tl.tensor,
    TILE: tl.constexpr,
    ADAPTERS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program: it counts the rows of each adapter, then lays out tiles and rows."""
    each = tl.arange(0, ADAPTERS)
    counts = tl.zeros((ADAPTERS,), tl.int32)
    for begin in range(0, num_rows, BLOCK):
        row = begin + tl.arange(0, BLOCK)
        adapter = tl.load(adapters_ptr + row, mask=row < num_rows, other=-1)
        counts += tl.sum((adapter[:, None] == each[None, :]).to(tl.int32), 0)
    starts = tl.cumsum(counts, 0) - counts
    own_tiles = (counts + TILE - 1) // TILE
    ends = tl.cumsum(own_tiles, 0)
    for begin in range(0, num_tiles, BLOCK):
        tile = begin + tl.arange(0, BLOCK)
        # The adapter whose tiles end after this one is the number of those whose end before.
        adapter = tl.sum((ends[None, :] <= tile[:, None]).to(tl.int32), 1)
        its = (adapter[:, None] == each[None, :]).to(tl.int32)
        done = (tile - tl.sum(its * (ends - own_tiles)[None, :], 1)) * TILE
        first = tl.sum(its * starts[None, :], 1) + done
        number = tl.minimum(tl.sum(its * counts[None, :], 1) - done, TILE)
        place, inside = tl.where(adapter < ADAPTERS, adapter, -1), tile < num_tiles
        tl.store(tiles_ptr + tile * 3, place, mask=inside)
        tl.store(tiles_ptr + tile * 3 + 1, first, mask=inside)
        tl.store(tiles_ptr + tile * 3 + 2, number, mask=inside)
    placed = starts
    for begin in range(0, num_rows, BLOCK):
        row = begin + tl.arange(0, BLOCK)
        adapter = tl.load(adapters_ptr + row, mask=row < num_rows, other=-1)
        its = (adapter[:, None] == each[None, :]).to(tl.int32)
        within = tl.cumsum(its, 0) - its + placed[None, :]
        tl.store(order_ptr + tl.sum(its * within, 1), row, mask=adapter >= 0)
        placed += tl.sum(its, 0)
