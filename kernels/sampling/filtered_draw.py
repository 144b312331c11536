# mypy: disable-error-code="untyped-decorator"
"""Draws tokens for rows with min-p, top-k or top-p, one program per row.

    logits [R, V], candidates [2, R, T], slots [R], slot_state [S, NUM_FIELDS]
      ->  replaces each such row's candidates: its drawn token with the best score

A row is filtered by min-p, then top-k (tokens tied with the k-th are all kept), then top-p (of
equal logits the lower ids first), and sampled by Gumbel-max among the kept tokens. Rows are not
sorted: thresholds are found by bisection over the bits of the logits, in 16 steps for a 16-bit
dtype. This reads the row's shortlist, or the whole row if the filters may keep tokens that are not
listed.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.pdl import has_pdl, launch_options
from kernels.sampling.gumbel import gumbel_noise, noise_key
from kernels.sampling.sample import MAX_TILES
from kernels.sampling.shortlist import NUM_LEVELS, list_end, listed_weight, scale, shortlist
from kernels.sampling.slot_state import (
    MIN_P,
    NUM_FIELDS,
    NUM_PROMPT,
    NUM_TOKENS,
    SEED,
    TOP_K,
    TOP_P,
    load_float,
)

_TILE = 8192


def draw_filtered(
    logits: torch.Tensor, candidates: torch.Tensor, slots: torch.Tensor, slot_state: torch.Tensor
) -> None:
    """Replaces the candidates of filtered rows, except of rows that are not finite."""
    num_rows, vocab_size = logits.shape
    _, num_candidates, num_tiles = candidates.shape
    if num_candidates != num_rows or slots.shape != (num_rows,) or logits.stride(1) != 1:
        raise ValueError(f"{tuple(candidates.shape)=} and {slots.shape=} for {num_rows} rows")
    if num_rows == 0:
        return
    lists = shortlist(logits, candidates, slots, slot_state)
    num_chunks = lists.totals.shape[1]
    _draw_kernel[(num_rows,)](
        logits, candidates, slots, slot_state,
        lists.logits, lists.token_ids, lists.counts, lists.totals,
        logits.stride(0), vocab_size, num_tiles, num_chunks,
        LENGTH=lists.logits.shape[1],
        MAX_CHUNKS=triton.next_power_of_2(num_chunks),
        TILES=MAX_TILES,
        TILE=_TILE,
        PDL=has_pdl(logits),
        num_warps=32,
        **launch_options(logits),
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_tiles"])
def _draw_kernel(
    logits_ptr: tl.tensor,
    found_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    state_ptr: tl.tensor,
    list_ptr: tl.tensor,
    list_ids_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    totals_ptr: tl.tensor,
    stride_row: tl.tensor,
    vocab_size: tl.tensor,
    num_tiles: tl.tensor,
    num_chunks: tl.tensor,
    LENGTH: tl.constexpr,
    MAX_CHUNKS: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    peak, sharpness = scale(found_ptr, slots_ptr, state_ptr, row, num_tiles, TILES)
    if sharpness > 0.0:
        state = state_ptr + tl.load(slots_ptr + row).to(tl.int64) * NUM_FIELDS
        top_k = tl.load(state + TOP_K).to(tl.int32)
        top_p, min_p = load_float(state + TOP_P), load_float(state + MIN_P)
        end, length = list_end(
            counts_ptr + row * num_chunks * NUM_LEVELS, num_chunks, MAX_CHUNKS, LENGTH
        )  # fmt: skip
        chunks = tl.arange(0, MAX_CHUNKS)
        totals = totals_ptr + row * num_chunks + chunks
        total = tl.sum(tl.load(totals, mask=chunks < num_chunks, other=0.0), 0)
        ids_ptr = list_ids_ptr + row * LENGTH
        is_listed = end == 1  # with level 1, all tokens that can win are listed
        if (end > 1) & (end < NUM_LEVELS):
            is_listed = _keeps_listed(
                list_ptr + row * LENGTH, length, total, listed_weight(end), peak, sharpness,
                top_k, top_p, min_p, TILE,
            )  # fmt: skip
        if is_listed:
            x_ptr = list_ptr + row * LENGTH
            num_tokens = length
        else:
            x_ptr = logits_ptr + row * stride_row
            num_tokens = vocab_size
        position = tl.load(state + NUM_TOKENS) - tl.load(state + NUM_PROMPT)
        row_key = noise_key(tl.load(state + SEED), position)
        token = _draw(
            x_ptr, ids_ptr, num_tokens, is_listed, total, peak, sharpness, top_k, top_p, min_p,
            row_key, TILE,
        )  # fmt: skip
        found = found_ptr + row * num_tiles
        tl.store(found, float("inf"))
        tl.store(found + tl.num_programs(0) * num_tiles, token.to(tl.float64))


@triton.jit
def _draw(
    x_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    vocab_size: tl.tensor,
    is_listed: tl.tensor,
    total: tl.tensor,
    peak: tl.tensor,
    sharpness: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    row_key: tl.tensor,
    TILE: tl.constexpr,
) -> tl.tensor:
    """Token by Gumbel-max among the kept tokens.

    With a shortlist, `ids` are its tokens and `total` is the weight of the whole row.
    """
    lowest, highest = _key_range(x_ptr)
    bar = lowest  # lowest kept key
    if top_k > 0:
        end = highest
        while end - bar > 1:
            middle = bar + (end - bar) // 2
            count = _count(x_ptr, vocab_size, middle, TILE)
            if count >= top_k:
                bar = middle
            else:
                end = middle
            if count == top_k:
                end = bar + 1
    num_ties = vocab_size  # number of kept tokens with that key
    if top_p < 1.0:
        mass = _mass(x_ptr, vocab_size, peak, sharpness, bar, min_p, TILE)
        # Unlisted tokens count only if top-p is the only filter.
        target = top_p * tl.where(is_listed & (top_k == 0) & (min_p == 0.0), total, mass)
        end = highest
        while end - bar > 1:
            middle = bar + (end - bar) // 2
            if _mass(x_ptr, vocab_size, peak, sharpness, middle, min_p, TILE) >= target:
                bar = middle
            else:
                end = middle
        above = _mass(x_ptr, vocab_size, peak, sharpness, bar + 1, min_p, TILE)
        weight = _weight_at(x_ptr, vocab_size, peak, sharpness, bar, TILE)
        num_ties = tl.maximum(1, tl.ceil((target - above) / weight).to(tl.int32))
    return _gumbel_argmax(
        x_ptr, ids_ptr, vocab_size, is_listed, peak, sharpness, bar, min_p, num_ties, row_key, TILE
    )  # fmt: skip


@triton.jit
def _keeps_listed(
    x_ptr: tl.tensor,
    length: tl.tensor,
    total: tl.tensor,
    weight: tl.tensor,
    peak: tl.tensor,
    sharpness: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    TILE: tl.constexpr,
) -> tl.tensor:
    """True if the filters keep listed tokens only; listed are all tokens from `weight` on."""
    keeps = (top_k > 0) & (length >= top_k)
    keeps = keeps | (min_p > 1.01 * weight)  # margin for rounded levels
    if (top_k == 0) & (min_p == 0.0):
        lowest, _ = _key_range(x_ptr)
        mass = _mass(x_ptr, length, peak, sharpness, lowest, min_p, TILE)
        keeps = mass >= top_p * total
    return keeps


@triton.jit
def _key(x: tl.tensor) -> tl.tensor:
    """Maps floats to integers of the same order."""
    WIDTH: tl.constexpr = x.dtype.primitive_bitwidth
    bits = x.to(tl.int16 if WIDTH == 16 else tl.int32, bitcast=True).to(tl.int32)
    return bits ^ ((bits >> 31) & (2 ** (WIDTH - 1) - 1))


@triton.jit
def _key_range(x_ptr: tl.tensor) -> tl.tensor:
    """(lower bound of keys, upper bound of finite keys), without overflow in the bisection."""
    HALF: tl.constexpr = 2 ** (x_ptr.dtype.element_ty.primitive_bitwidth - 1)
    return tl.full([], -HALF, tl.int64), tl.full([], HALF - 1, tl.int64)


@triton.jit
def _load(x_ptr: tl.tensor, ids: tl.tensor, vocab_size: tl.tensor) -> tl.tensor:
    return tl.load(x_ptr + ids, mask=ids < vocab_size, other=float("-inf"))


@triton.jit
def _weights(x: tl.tensor, peak: tl.tensor, sharpness: tl.tensor) -> tl.tensor:
    return tl.exp((x.to(tl.float32) - peak) * sharpness)


@triton.jit
def _count(
    x_ptr: tl.tensor, vocab_size: tl.tensor, bar: tl.tensor, TILE: tl.constexpr
) -> tl.tensor:
    total = tl.zeros([TILE], tl.int32)
    bar = bar.to(tl.int32)
    for first in range(0, vocab_size, TILE):
        ids = first + tl.arange(0, TILE)
        x = _load(x_ptr, ids, vocab_size)
        total += ((_key(x) >= bar) & (ids < vocab_size)).to(tl.int32)
    return tl.sum(total, 0)


@triton.jit
def _mass(
    x_ptr: tl.tensor,
    vocab_size: tl.tensor,
    peak: tl.tensor,
    sharpness: tl.tensor,
    bar: tl.tensor,
    min_p: tl.tensor,
    TILE: tl.constexpr,
) -> tl.tensor:
    """Weight of all tokens from both thresholds on; in fixed order, so monotonic in `bar`."""
    total = tl.zeros([TILE], tl.float32)
    bar = bar.to(tl.int32)
    for first in range(0, vocab_size, TILE):
        x = _load(x_ptr, first + tl.arange(0, TILE), vocab_size)
        weights = _weights(x, peak, sharpness)
        total += tl.where((_key(x) >= bar) & (weights >= min_p), weights, 0.0)
    return tl.sum(total, 0)


@triton.jit
def _weight_at(
    x_ptr: tl.tensor,
    vocab_size: tl.tensor,
    peak: tl.tensor,
    sharpness: tl.tensor,
    bar: tl.tensor,
    TILE: tl.constexpr,
) -> tl.tensor:
    """Weight of a token with key `bar`, or of the lightest above it."""
    lightest = tl.full([TILE], 1.0, tl.float32)
    bar = bar.to(tl.int32)
    for first in range(0, vocab_size, TILE):
        x = _load(x_ptr, first + tl.arange(0, TILE), vocab_size)
        weights = _weights(x, peak, sharpness)
        lightest = tl.minimum(lightest, tl.where(_key(x) >= bar, weights, 1.0))
    return tl.min(lightest, 0)


@triton.jit
def _gumbel_argmax(
    x_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    vocab_size: tl.tensor,
    is_listed: tl.tensor,
    peak: tl.tensor,
    sharpness: tl.tensor,
    bar: tl.tensor,
    min_p: tl.tensor,
    num_ties: tl.tensor,
    row_key: tl.tensor,
    TILE: tl.constexpr,
) -> tl.tensor:
    """The kept token with the largest sum of scaled logit and Gumbel noise."""
    bar = bar.to(tl.int32)
    ties_before = tl.full([], 0, tl.int32)
    best = tl.full([], float("-inf"), tl.float32)
    token = tl.full([], 0, tl.int32)
    for first in range(0, vocab_size, TILE):
        i = first + tl.arange(0, TILE)
        x = _load(x_ptr, i, vocab_size)
        ids = tl.load(ids_ptr + i, mask=i < tl.where(is_listed, vocab_size, 0), other=0)
        ids = tl.where(is_listed, ids, i)
        key = _key(x)
        is_tie = (key == bar).to(tl.int32)
        rank = ties_before + tl.cumsum(is_tie, 0)  # 1 for the first tie
        kept = (key > bar) | ((is_tie > 0) & (rank <= num_ties))
        kept = kept & (_weights(x, peak, sharpness) >= min_p) & (i < vocab_size)
        scores = (x.to(tl.float32) - peak) * sharpness + gumbel_noise(row_key, ids)
        scores = tl.where(kept, scores, float("-inf"))
        score, at = tl.max(scores, 0, return_indices=True, return_indices_tie_break_left=True)
        token = tl.where(score > best, first + at, token)
        best = tl.maximum(best, score)
        ties_before += tl.sum(is_tie, 0)
    if is_listed:
        token = tl.load(ids_ptr + token)
    return token
