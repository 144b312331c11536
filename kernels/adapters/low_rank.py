# mypy: disable-error-code="untyped-decorator"
"""Products of low rank that adapters add to a linear layer: y += B (A x), each row by its own.

    x [T, K], y [T, N], RowGroups, AdapterStacks  ->  y, in place

Two kernels: one shrinks rows to A x [parts, R] in float32, by parts of K that it does not add up;
the other adds these, in one order, and expands them. Products are by tiles of rows of one adapter.
With `eps`, x is the row before its norm: A has the norm's weight, and the result is divided by the
RMS of x, whose squares are summed where x is read. Tiles without an adapter return at once.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.adapters.group_rows import FEW_ROWS
from kernels.adapters.stacks import AdaptedLayer, AdapterStacks, RowGroups
from kernels.pdl import has_pdl, launch_options

OUTPUTS = 128  # of a program that expands; blocks of `AdaptedLayer` have at most as many
_MOST_RANKS = 64  # of a program that shrinks
# Inputs of a program that shrinks few rows, or many: few rows have few tiles, and would leave most
# of the device idle.
_INPUTS_OF_FEW, _INPUTS_OF_MANY = 1024, 8192
_MOST_SPLITS = 8


class _Shrunk(NamedTuple):
    """A x of a batch's rows, in the order of their groups."""

    sums: torch.Tensor  # [splits, T, parts * max_rank] float32
    squares: torch.Tensor  # [splits, T] float32, of x; not written without a norm


def add_low_rank(
    x: torch.Tensor,
    y: torch.Tensor,
    layer: AdaptedLayer,
    stacks: AdapterStacks,
    rows: RowGroups,
    eps: float | None = None,
) -> None:
    """Adds to y [T, N] in place what the adapters of its rows make of x [T, K]."""
    if x.shape != (len(y), layer.num_inputs) or y.shape[1] < layer.num_outputs:
        raise ValueError(
            f"x {tuple(x.shape)} and y {tuple(y.shape)} of a layer "
            f"[{layer.num_outputs}, {layer.num_inputs}]"
        )
    if len(rows.order) != len(x):
        raise ValueError(f"groups of {len(rows.order)} rows, not of {len(x)}")
    if x.stride(1) != 1 or y.stride(1) != 1:
        raise ValueError("rows of x and y must be contiguous")
    if not x.dtype == y.dtype == stacks.values.dtype:
        raise TypeError(f"x in {x.dtype}, y in {y.dtype}, adapters in {stacks.values.dtype}")
    shrunk = _shrink(x, layer, stacks, rows, has_norm=eps is not None)
    _expand_kernel[(len(rows.tiles), len(layer.blocks))](
        shrunk.sums, shrunk.squares, rows.order, rows.tiles, stacks.values, stacks.ranks,
        layer.blocks, y,
        y.stride(0),
        len(x),
        layer.index,
        stacks.ranks.shape[1],
        stacks.values.stride(0),
        layer.b_at,
        0.0 if eps is None else eps,
        K=layer.num_inputs, WIDTH=shrunk.sums.shape[2],
        MAX_RANK=stacks.max_rank, SPLITS=len(shrunk.sums),
        TILE=rows.tile_rows, RANKS=_ranks(stacks, 32), BLOCK=OUTPUTS,
        HALVES=x.dtype == torch.bfloat16, DIVIDES=eps is not None, PDL=has_pdl(x),
        num_warps=4,
        **launch_options(x),
    )  # fmt: skip


def _shrink(
    x: torch.Tensor, layer: AdaptedLayer, stacks: AdapterStacks, rows: RowGroups, *, has_norm: bool
) -> _Shrunk:
    num_rows, width = len(x), len(layer.parts) * stacks.max_rank
    of_one = _INPUTS_OF_FEW if num_rows <= FEW_ROWS else _INPUTS_OF_MANY
    splits = max(1, min(_MOST_SPLITS, layer.num_inputs // of_one))
    step = _inputs(x, rows)
    inputs = triton.cdiv(triton.cdiv(layer.num_inputs, splits), step) * step
    ranks = _ranks(stacks, _MOST_RANKS)
    rank_blocks = triton.cdiv(stacks.max_rank, ranks)
    sums = torch.empty((splits, num_rows, width), dtype=torch.float32, device=x.device)
    squares = torch.empty((splits, num_rows), dtype=torch.float32, device=x.device)
    _shrink_kernel[(len(rows.tiles), splits, len(layer.parts) * rank_blocks)](
        x, rows.order, rows.tiles, stacks.values, stacks.ranks, sums, squares,
        x.stride(0),
        num_rows,
        layer.index,
        stacks.ranks.shape[1],
        stacks.values.stride(0),
        layer.a_at,
        K=layer.num_inputs, INPUTS=inputs, WIDTH=width,
        MAX_RANK=stacks.max_rank, RANK_BLOCKS=rank_blocks,
        TILE=rows.tile_rows, RANKS=ranks, STEP=step,
        SQUARES=has_norm, PDL=has_pdl(x),
        num_warps=4, num_stages=3,
        **launch_options(x),
    )  # fmt: skip
    return _Shrunk(sums, squares)


def _ranks(stacks: AdapterStacks, most: int) -> int:
    """Ranks that a program multiplies at once."""
    return min(most, int(triton.next_power_of_2(stacks.max_rank)))


def _inputs(x: torch.Tensor, rows: RowGroups) -> int:
    """Inputs that a program multiplies at once, so that three turns of them fit where they wait."""
    few, many = (128, 64) if x.dtype == torch.float32 else (256, 128)
    return few if len(rows.order) <= FEW_ROWS else many


# Numbers that differ from layer to layer, or from step to step: one kernel serves all of them.
@triton.jit(do_not_specialize=["num_rows", "layer", "num_numbers", "a_at"])
def _shrink_kernel(
    x_ptr: tl.tensor,
    order_ptr: tl.tensor,
    tiles_ptr: tl.tensor,
    values_ptr: tl.tensor,
    ranks_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    squares_ptr: tl.tensor,
    stride_x: tl.tensor,
    num_rows: tl.tensor,
    layer: tl.tensor,
    num_numbers: tl.tensor,
    stride_values: tl.tensor,
    a_at: tl.tensor,
    K: tl.constexpr,
    INPUTS: tl.constexpr,
    WIDTH: tl.constexpr,
    MAX_RANK: tl.constexpr,
    RANK_BLOCKS: tl.constexpr,
    TILE: tl.constexpr,
    RANKS: tl.constexpr,
    STEP: tl.constexpr,
    SQUARES: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    tile = tiles_ptr + tl.program_id(0) * 3
    split = tl.program_id(1)
    part, of_rank = tl.program_id(2) // RANK_BLOCKS, tl.program_id(2) % RANK_BLOCKS * RANKS
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    place = tl.load(tile)
    if place >= 0:
        numbers = ranks_ptr + place * num_numbers
        stride = tl.multiple_of(tl.load(numbers), 16).to(tl.int64)
        rank = tl.load(numbers + layer)
        if of_rank < rank:
            m = tl.arange(0, TILE)
            is_row = m < tl.load(tile + 2)
            at = tl.load(tile + 1) + m
            row = tl.load(order_ptr + at, mask=is_row, other=0).to(tl.int64)
            r = of_rank + tl.arange(0, RANKS)
            is_rank = r < rank
            a_ptr = values_ptr + place.to(tl.int64) * stride_values + stride * a_at
            a_rows = a_ptr + (part * stride + r)[:, None] * K
            x_rows = x_ptr + (row * stride_x)[:, None]
            sums = tl.zeros((TILE, RANKS), tl.float32)
            squares = tl.zeros((TILE,), tl.float32)
            for begin in range(0, INPUTS, STEP):
                k = split * INPUTS + begin + tl.arange(0, STEP)
                x = tl.load(x_rows + k[None, :], mask=is_row[:, None] & (k < K)[None, :], other=0.0)
                a = tl.load(
                    a_rows + k[None, :], mask=is_rank[:, None] & (k < K)[None, :], other=0.0
                )
                sums = tl.dot(x, a.T, sums, input_precision="ieee")
                if SQUARES:
                    wide = x.to(tl.float32)
                    squares += tl.sum(wide * wide, 1)
            # In the order of the groups: the rows of a tile lie side by side.
            place_of = (split * num_rows + at).to(tl.int64)
            to = sums_ptr + (place_of * WIDTH + part * MAX_RANK)[:, None] + r[None, :]
            tl.store(to, sums, mask=is_row[:, None] & (r < MAX_RANK)[None, :])
            if SQUARES:  # noqa: SIM102 - known when it is compiled, unlike the next
                if tl.program_id(2) == 0:
                    tl.store(squares_ptr + place_of, squares, mask=is_row)


@triton.jit(do_not_specialize=["num_rows", "layer", "num_numbers", "b_at"])
def _expand_kernel(
    sums_ptr: tl.tensor,
    squares_ptr: tl.tensor,
    order_ptr: tl.tensor,
    tiles_ptr: tl.tensor,
    values_ptr: tl.tensor,
    ranks_ptr: tl.tensor,
    blocks_ptr: tl.tensor,
    y_ptr: tl.tensor,
    stride_y: tl.tensor,
    num_rows: tl.tensor,
    layer: tl.tensor,
    num_numbers: tl.tensor,
    stride_values: tl.tensor,
    b_at: tl.tensor,
    eps: tl.tensor,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    MAX_RANK: tl.constexpr,
    SPLITS: tl.constexpr,
    TILE: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
    HALVES: tl.constexpr,  # a number in float32 as the sum of two in the type of B
    DIVIDES: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    tile = tiles_ptr + tl.program_id(0) * 3
    block = blocks_ptr + tl.program_id(1) * 3
    part, begin, end = tl.load(block), tl.load(block + 1), tl.load(block + 2)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    place = tl.load(tile)
    if place >= 0:
        numbers = ranks_ptr + place * num_numbers
        stride = tl.multiple_of(tl.load(numbers), 16).to(tl.int64)
        rank = tl.load(numbers + layer)
        m = tl.arange(0, TILE)
        is_row = m < tl.load(tile + 2)
        at = (tl.load(tile + 1) + m).to(tl.int64)
        row = tl.load(order_ptr + at, mask=is_row, other=0).to(tl.int64)
        n = begin + tl.arange(0, BLOCK)
        is_output = n < end
        b_ptr = values_ptr + place.to(tl.int64) * stride_values + stride * b_at
        b_rows = b_ptr + (n * stride)[:, None]
        total = tl.zeros((TILE, BLOCK), tl.float32)
        for of_rank in range(0, rank, RANKS):
            r = of_rank + tl.arange(0, RANKS)
            is_rank = r < rank
            b = tl.load(b_rows + r[None, :], mask=is_output[:, None] & is_rank[None, :], other=0.0)
            given = sums_ptr + part * MAX_RANK + r
            shrunk = tl.zeros((TILE, RANKS), tl.float32)
            for split in tl.static_range(SPLITS):
                of_split = given[None, :] + ((split * num_rows + at) * WIDTH)[:, None]
                shrunk += tl.load(of_split, mask=is_row[:, None] & is_rank[None, :], other=0.0)
            if HALVES:
                large = shrunk.to(b.dtype)
                small = (shrunk - large.to(tl.float32)).to(b.dtype)
                total = tl.dot(large, b.T, total)
                total = tl.dot(small, b.T, total)
            else:
                total = tl.dot(shrunk, b.to(tl.float32).T, total, input_precision="ieee")
        if rank > 0:
            if DIVIDES:
                squares = tl.zeros((TILE,), tl.float32)
                for split in tl.static_range(SPLITS):
                    squares += tl.load(squares_ptr + split * num_rows + at, mask=is_row, other=0.0)
                total *= tl.rsqrt(squares / K + eps)[:, None]
            to = y_ptr + (row * stride_y)[:, None] + n[None, :]
            inside = is_row[:, None] & is_output[None, :]
            sum_with = tl.load(to, mask=inside, other=0.0).to(tl.float32) + total
            tl.store(to, sum_with.to(y_ptr.dtype.element_ty), mask=inside)
