# mypy: disable-error-code="untyped-decorator"
"""Lists the most likely tokens of each filtered row, usually all that can be drawn.

    logits [R, V], candidates [2, R, T], slots [R], slot_state [S, NUM_FIELDS]  ->  Shortlists

Filters read a row many times; with a shortlist they read LENGTH tokens instead. It holds all tokens
down to some weight relative to the largest, in order of ids. Weights are divided into levels, equal
for all rows: a row's list ends at the lowest level that keeps it within LENGTH tokens. Tokens below
level 1 cannot be drawn: even the largest Gumbel noise would not lift them above the row's best
token with the smallest noise.

Chunks of a row are counted and copied in parallel and joined in a fixed order, so the list depends
on the row only.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.pdl import has_pdl, launch_options
from kernels.sampling.sample import MAX_TILES
from kernels.sampling.slot_state import NUM_FIELDS, filtering_temperature

LENGTH = 8192
NUM_LEVELS = tl.constexpr(32)
# The Gumbel noise is between -2.9 and 16.7.
_HOPELESS = tl.constexpr(20.0)  # in log weight
_LEVELS_PER_OCTAVE = tl.constexpr(3.0)
_CHUNK = 4096


@dataclass(frozen=True, slots=True)
class Shortlists:
    """The listed logits of each row, then unused entries; and the counts of the row's chunks."""

    logits: torch.Tensor  # [R, LENGTH], not scaled
    token_ids: torch.Tensor  # [R, LENGTH] int32
    counts: torch.Tensor  # [R, C, NUM_LEVELS] int32: tokens of each level
    totals: torch.Tensor  # [R, C] float32: weights of all tokens


def shortlist(
    logits: torch.Tensor, candidates: torch.Tensor, slots: torch.Tensor, slot_state: torch.Tensor
) -> Shortlists:
    """Builds the lists of filtered rows; those of other rows are undefined."""
    num_rows, vocab_size = logits.shape
    num_chunks, num_tiles = triton.cdiv(vocab_size, _CHUNK), candidates.shape[2]
    lists = Shortlists(
        logits.new_empty((num_rows, LENGTH)),
        slots.new_empty((num_rows, LENGTH)),
        slots.new_empty((num_rows, num_chunks, NUM_LEVELS.value)),
        logits.new_empty((num_rows, num_chunks), dtype=torch.float32),
    )
    where = (logits, candidates, slots, slot_state)
    sizes = (logits.stride(0), vocab_size, num_tiles)
    options = {"PDL": has_pdl(logits), "num_warps": 8} | launch_options(logits)
    _survey_kernel[(num_rows, num_chunks)](
        *where, lists.counts, lists.totals, *sizes, CHUNK=_CHUNK, TILES=MAX_TILES, **options
    )
    _list_kernel[(num_rows, num_chunks)](
        *where, lists.counts, lists.logits, lists.token_ids, *sizes,
        MAX_CHUNKS=triton.next_power_of_2(num_chunks), LENGTH=LENGTH, CHUNK=_CHUNK,
        TILES=MAX_TILES, **options,
    )  # fmt: skip
    return lists


@triton.jit(do_not_specialize=["num_tiles"])
def _survey_kernel(
    logits_ptr: tl.tensor,
    found_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    state_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    totals_ptr: tl.tensor,
    stride_row: tl.tensor,
    vocab_size: tl.tensor,
    num_tiles: tl.tensor,
    CHUNK: tl.constexpr,
    TILES: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Counts the tokens of a chunk in each level and sums their weights."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    peak, sharpness = scale(found_ptr, slots_ptr, state_ptr, row, num_tiles, TILES)
    if sharpness > 0.0:
        part = row * tl.num_programs(1) + tl.program_id(1)
        row_ptr = logits_ptr + row * stride_row
        _, _, scaled = _chunk(row_ptr, vocab_size, peak, sharpness, CHUNK)
        tl.store(totals_ptr + part, tl.sum(tl.exp(scaled), 0))
        counts = tl.histogram(_level(scaled), NUM_LEVELS)
        tl.store(counts_ptr + part * NUM_LEVELS + tl.arange(0, NUM_LEVELS), counts)


@triton.jit(do_not_specialize=["num_tiles"])
def _list_kernel(
    logits_ptr: tl.tensor,
    found_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    state_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    list_ptr: tl.tensor,
    list_ids_ptr: tl.tensor,
    stride_row: tl.tensor,
    vocab_size: tl.tensor,
    num_tiles: tl.tensor,
    MAX_CHUNKS: tl.constexpr,
    LENGTH: tl.constexpr,
    CHUNK: tl.constexpr,
    TILES: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Copies a chunk's listed tokens to their place after the previous chunks'."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    peak, sharpness = scale(found_ptr, slots_ptr, state_ptr, row, num_tiles, TILES)
    if sharpness > 0.0:
        num_chunks = tl.num_programs(1)
        row_counts = counts_ptr + row * num_chunks * NUM_LEVELS
        end, _ = list_end(row_counts, num_chunks, MAX_CHUNKS, LENGTH)
        start = _num_listed(row_counts, chunk, end, MAX_CHUNKS)
        if _num_listed(row_counts, chunk + 1, end, MAX_CHUNKS) > start:
            row_ptr = logits_ptr + row * stride_row
            i, x, scaled = _chunk(row_ptr, vocab_size, peak, sharpness, CHUNK)
            is_listed = _level(scaled) >= end
            at = row * LENGTH + start + tl.cumsum(is_listed.to(tl.int32), 0) - 1
            tl.store(list_ptr + at, x, mask=is_listed)
            tl.store(list_ids_ptr + at, i, mask=is_listed)


@triton.jit
def list_end(
    counts_ptr: tl.tensor, num_chunks: tl.tensor, MAX_CHUNKS: tl.constexpr, LENGTH: tl.constexpr
) -> tl.tensor:
    """(lowest listed level, NUM_LEVELS if there is no list; number of listed tokens)."""
    chunks, levels = tl.arange(0, MAX_CHUNKS)[:, None], tl.arange(0, NUM_LEVELS)
    exists = chunks < num_chunks
    counts = tl.load(counts_ptr + chunks * NUM_LEVELS + levels[None, :], mask=exists, other=0)
    counts = tl.sum(counts, 0)  # [NUM_LEVELS]
    down_to = tl.sum(counts, 0) - tl.cumsum(counts, 0) + counts
    end = tl.min(tl.where((down_to <= LENGTH) & (levels > 0), levels, NUM_LEVELS), 0)
    return end, tl.sum(tl.where(levels >= end, counts, 0), 0)


@triton.jit
def listed_weight(end: tl.tensor) -> tl.tensor:
    """Relative weight from which on all tokens are listed."""
    depth = tl.exp2((1.0 - end.to(tl.float32)) / _LEVELS_PER_OCTAVE) * _HOPELESS
    return tl.exp(-depth)


@triton.jit
def _num_listed(
    counts_ptr: tl.tensor, num_chunks: tl.tensor, end: tl.tensor, MAX_CHUNKS: tl.constexpr
) -> tl.tensor:
    """Number of listed tokens in the first chunks."""
    chunks, levels = tl.arange(0, MAX_CHUNKS)[:, None], tl.arange(0, NUM_LEVELS)[None, :]
    is_listed = (chunks < num_chunks) & (levels >= end)
    counts = tl.load(counts_ptr + chunks * NUM_LEVELS + levels, mask=is_listed, other=0)
    return tl.sum(tl.sum(counts, 1), 0)


@triton.jit
def scale(
    found_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    state_ptr: tl.tensor,
    row: tl.tensor,
    num_tiles: tl.tensor,
    TILES: tl.constexpr,
) -> tl.tensor:
    """(largest logit, 1 / temperature) of a row; (0, 0) if it needs no list."""
    peak = tl.full([], 0.0, tl.float32)
    sharpness = tl.full([], 0.0, tl.float32)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    if slot >= 0:
        temperature = filtering_temperature(state_ptr + slot * NUM_FIELDS)
        tiles = tl.arange(0, TILES)
        found = found_ptr + row * num_tiles + tiles
        scores = tl.load(found, mask=tiles < num_tiles, other=float("-inf"))
        is_finite = tl.sum((scores != scores).to(tl.int32), 0) == 0
        if is_finite & (temperature > 0.0):
            peak = tl.max(scores, 0).to(tl.float32)
            sharpness = 1.0 / temperature
    return peak, sharpness


@triton.jit
def _chunk(
    x_ptr: tl.tensor,
    vocab_size: tl.tensor,
    peak: tl.tensor,
    sharpness: tl.tensor,
    CHUNK: tl.constexpr,
) -> tl.tensor:
    """(tokens, logits, log weights) of this program's chunk of a row."""
    i = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(x_ptr + i, mask=i < vocab_size, other=float("-inf"))
    return i, x, (x.to(tl.float32) - peak) * sharpness


@triton.jit
def _level(scaled: tl.tensor) -> tl.tensor:
    """Level of log weights: 0 if the token cannot be drawn, higher for larger weights."""
    depth = tl.maximum(-scaled, 1e-9) / _HOPELESS
    level = 1.0 - tl.log2(depth) * _LEVELS_PER_OCTAVE
    return tl.minimum(tl.maximum(level, 0.0), NUM_LEVELS - 1.0).to(tl.int32)
