# mypy: disable-error-code="untyped-decorator"
"""The draw of one row whose parameters filter, inside a kernel that has a program for the row.

    logits [V], their largest, temperature, top-k, top-p, min-p, race key  ->  a token

The row keeps what min-p, then top-k (ties at its bar stay together), then top-p (of equals the
lower ids first) let pass, and runs a race among them. No row is sorted: bars are found by halving
the interval of the logits' own bits, 16 for a 16-bit type.
"""

import triton
import triton.language as tl

from kernels.race import race_numbers


@triton.jit
def draw_filtered(
    x_ptr: tl.tensor,
    vocab_size: tl.tensor,
    peak: tl.tensor,
    sharpness: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    race: tl.tensor,
    TILE: tl.constexpr,
) -> tl.tensor:
    """The winner of a race among the kept."""
    lowest, highest = _key_range(x_ptr)
    bar = lowest  # the lowest key kept
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
    num_ties = vocab_size  # how many of the tokens at the bar are kept
    if top_p < 1.0:
        target = top_p * _mass(x_ptr, vocab_size, peak, sharpness, bar, min_p, TILE)
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
    return _race(
        x_ptr, vocab_size, peak, sharpness, bar, min_p, num_ties, race, TILE
    )  # fmt: skip


@triton.jit
def _key(x: tl.tensor) -> tl.tensor:
    """Integers in the order of the floats."""
    WIDTH: tl.constexpr = x.dtype.primitive_bitwidth
    bits = x.to(tl.int16 if WIDTH == 16 else tl.int32, bitcast=True).to(tl.int32)
    return bits ^ ((bits >> 31) & (2 ** (WIDTH - 1) - 1))


@triton.jit
def _key_range(x_ptr: tl.tensor) -> tl.tensor:
    """(no key is lower, no finite key is as high), so wide that halving cannot overflow."""
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
    """The weight of all that reach both bars; summed in one order, so a higher bar never adds."""
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
    """The weight of a token at the bar, or of the lightest above it."""
    lightest = tl.full([TILE], 1.0, tl.float32)
    bar = bar.to(tl.int32)
    for first in range(0, vocab_size, TILE):
        x = _load(x_ptr, first + tl.arange(0, TILE), vocab_size)
        weights = _weights(x, peak, sharpness)
        lightest = tl.minimum(lightest, tl.where(_key(x) >= bar, weights, 1.0))
    return tl.min(lightest, 0)


@triton.jit
def _race(
    x_ptr: tl.tensor,
    vocab_size: tl.tensor,
    peak: tl.tensor,
    sharpness: tl.tensor,
    bar: tl.tensor,
    min_p: tl.tensor,
    num_ties: tl.tensor,
    race: tl.tensor,
    TILE: tl.constexpr,
) -> tl.tensor:
    """The kept token with the largest sum of scaled logit and its own number."""
    bar = bar.to(tl.int32)
    ties_before = tl.full([], 0, tl.int32)
    best = tl.full([], float("-inf"), tl.float32)
    token = tl.full([], 0, tl.int32)
    for first in range(0, vocab_size, TILE):
        ids = first + tl.arange(0, TILE)
        x = _load(x_ptr, ids, vocab_size)
        key = _key(x)
        is_tie = (key == bar).to(tl.int32)
        rank = ties_before + tl.cumsum(is_tie, 0)  # from 1 on at the ties
        kept = (key > bar) | ((is_tie > 0) & (rank <= num_ties))
        kept = kept & (_weights(x, peak, sharpness) >= min_p) & (ids < vocab_size)
        scores = (x.to(tl.float32) - peak) * sharpness + race_numbers(race, ids)
        scores = tl.where(kept, scores, float("-inf"))
        score, at = tl.max(scores, 0, return_indices=True, return_indices_tie_break_left=True)
        token = tl.where(score > best, first + at, token)
        best = tl.maximum(best, score)
        ties_before += tl.sum(is_tie, 0)
    return token
