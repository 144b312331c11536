# mypy: disable-error-code="untyped-decorator"
"""The gated delta rule of segments that have more than one token, by chunks; see `delta_net`.

A chunk's corrections X solve a triangular system, (1 + A) X = beta (V - kept K S), where S is the
state before the chunk. What does not depend on S is computed for all chunks at once: the inverse
of 1 + A, and how much each query meets of each correction. Then a program goes from chunk to chunk
with some columns of a head's state in its registers.

Products with the state are of float32 numbers; see `functions.product`.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.pdl import has_pdl, launch_options
from kernels.recurrent.delta_rule import EPS, DeltaHeads
from kernels.recurrent.functions import (
    decays_between,
    precision,
    sigmoid,
    softplus,
    square_product,
    state_row,
    weighted,
)
from kernels.recurrent.segments import CHUNK, Bounds, Segments

# Columns of a program's state, and the least rows; see `scan_chunks`.
_BLOCK_V, _LEAST_BLOCK_K = 32, 64
_NUM_FACTORS = 4  # of each token of a chunk: see `_prepare_kernel`


def update_by_chunks(
    channels: torch.Tensor,
    steps: torch.Tensor,
    heads: DeltaHeads,
    states: torch.Tensor,
    segments: Segments,
    out: torch.Tensor,
) -> None:
    """Writes outputs and states of the segments of two tokens and more; leaves others alone."""
    bounds = segments.bounds
    assert bounds is not None
    is_exact = channels.dtype == torch.float32
    factors, inverses, scores = _prepared(channels, steps, heads, bounds)
    num_tiles = triton.cdiv(heads.value_dim, _BLOCK_V)
    _follow_kernel[(num_tiles, heads.num_values, len(segments))](
        channels, factors, inverses, scores, states,
        segments.before, segments.after, segments.is_first, bounds.begin, bounds.end, out,
        channels.stride(0),
        states.stride(0),
        KEYS=heads.num_keys,
        VALUES=heads.num_values,
        DK=heads.key_dim,
        DV=heads.value_dim,
        BLOCK_K=max(_LEAST_BLOCK_K, triton.next_power_of_2(heads.key_dim)),
        BLOCK_V=_BLOCK_V,
        CHUNK=CHUNK,
        PARTS=_num_parts(channels),
        PRECISION=precision(channels),
        PDL=has_pdl(channels),
        num_warps=8,
        num_stages=1 if is_exact else 2,
        **launch_options(channels),
    )  # fmt: skip


def _num_parts(channels: torch.Tensor) -> int:
    return 2 if channels.dtype == torch.bfloat16 else 1


def _prepared(
    channels: torch.Tensor, steps: torch.Tensor, heads: DeltaHeads, bounds: Bounds
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Factors [C, V, 4, CHUNK] of tokens; inverses and scores of chunks.

    These are [C, V, 1, CHUNK, CHUNK] in float32, or two parts of each number in bfloat16.
    """
    per_head, num_parts = (bounds.num_chunks, heads.num_values), _num_parts(channels)
    factors = channels.new_empty((*per_head, _NUM_FACTORS, CHUNK), dtype=torch.float32)
    dtype = torch.float32 if num_parts == 1 else channels.dtype
    inverses, scores = (
        channels.new_empty((*per_head, num_parts, CHUNK, CHUNK), dtype=dtype) for _ in range(2)
    )
    _prepare_kernel[(heads.num_values, bounds.num_chunks)](
        channels, steps, heads.rates, heads.step_bias, bounds.begin, bounds.end, bounds.of_chunk,
        factors, inverses, scores,
        channels.stride(0),
        steps.stride(0),
        EPS,
        KEYS=heads.num_keys,
        VALUES=heads.num_values,
        DK=heads.key_dim,
        BLOCK_K=max(_LEAST_BLOCK_K, triton.next_power_of_2(heads.key_dim)),
        CHUNK=CHUNK,
        PARTS=num_parts,
        PRECISION=precision(channels),
        PDL=has_pdl(channels),
        num_warps=8,
        **launch_options(channels),
    )  # fmt: skip
    return factors, inverses, scores


@triton.jit
def _inverse_of_unit_lower(
    below: tl.tensor, IS_BF16: tl.constexpr, PRECISION: tl.constexpr
) -> tl.tensor:
    """The inverse of 1 + below, of strictly lower triangular numbers [64, 64].

    Blocks of 16 on the diagonal are inverted row by row. With D these blocks and M = D^-1 times
    what is below them, the inverse is (1 + M)^-1 D^-1, and M^4 = 0.
    """
    block, row = tl.arange(0, 4), tl.arange(0, 16)
    in_four = tl.reshape(below, [4, 16, 4, 16])
    is_diagonal = block[:, None, None, None] == block[None, None, :, None]
    blocks = tl.sum(tl.where(is_diagonal, in_four, 0.0), 2)  # [4, 16, 16]
    inverse = tl.where(row[None, :, None] == row[None, None, :], 1.0, tl.zeros_like(blocks))
    for i in range(1, 16):
        is_row = row[None, :, None] == i
        of_row = tl.sum(tl.where(is_row, blocks, 0.0), 1)  # [4, 16]
        known = tl.sum(of_row[:, :, None] * inverse, 1)
        inverse = tl.where(is_row, inverse - known[:, None, :], inverse)
    spread = tl.where(is_diagonal, inverse[:, :, None, :], tl.zeros_like(in_four))
    diagonal = tl.reshape(spread, [64, 64])
    at = tl.arange(0, 64) // 16
    lower = tl.where(at[:, None] > at[None, :], below, 0.0)
    m = square_product(diagonal, lower, IS_BF16, PRECISION)
    squared = square_product(m, m, IS_BF16, PRECISION)
    half = diagonal - square_product(m, diagonal, IS_BF16, PRECISION)
    return half + square_product(squared, half, IS_BF16, PRECISION)


@triton.jit
def _store_parts(
    to: tl.tensor, square: tl.tensor, PARTS: tl.constexpr, CHUNK: tl.constexpr
) -> None:
    """Stores float32 numbers [CHUNK, CHUNK], or two parts of each in the type of the memory."""
    high = square.to(to.dtype.element_ty)
    tl.store(to, high)
    if PARTS == 2:
        tl.store(to + CHUNK * CHUNK, (square - high.to(tl.float32)).to(to.dtype.element_ty))


@triton.jit
def _times(
    a: tl.tensor, from_: tl.tensor, total: tl.tensor, PARTS: tl.constexpr, CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """total + a b^T, of numbers b that `_store_parts` stored."""
    if PARTS == 2:
        low = tl.load(from_ + CHUNK * CHUNK)
        total = tl.dot(a.to(tl.bfloat16), tl.trans(low), acc=total)
    return weighted(a, tl.trans(tl.load(from_)), total, PRECISION)


@triton.jit
def _prepare_kernel(
    channels_ptr: tl.tensor,
    steps_ptr: tl.tensor,
    rates_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    begin_ptr: tl.tensor,
    end_ptr: tl.tensor,
    of_chunk_ptr: tl.tensor,
    factors_ptr: tl.tensor,
    inverses_ptr: tl.tensor,
    scores_ptr: tl.tensor,
    stride_channels: tl.tensor,
    stride_steps: tl.tensor,
    eps: tl.tensor,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    DK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr,
    PARTS: tl.constexpr,  # of the numbers of inverses and scores
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    head = tl.program_id(0)
    chunk = tl.program_id(1)
    rate, bias = tl.load(rates_ptr + head), tl.load(bias_ptr + head)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    segment = tl.load(of_chunk_ptr + chunk)
    begin, end = tl.load(begin_ptr + segment), tl.load(end_ptr + segment)
    first = begin + (chunk - begin // CHUNK - segment) * CHUNK
    if (first < begin) | (first >= end) | (end <= begin + 1):
        return
    i = tl.arange(0, CHUNK)
    t, d = first + i, tl.arange(0, BLOCK_K)
    is_t = t < end
    inside = is_t[:, None] & (d < DK)[None, :]
    key = t.to(tl.int64)[:, None] * stride_channels + head // (VALUES // KEYS) * DK + d[None, :]
    q = tl.load(channels_ptr + key, mask=inside, other=0.0)
    k = tl.load(channels_ptr + KEYS * DK + key, mask=inside, other=0.0)
    step_ptr = steps_ptr + t.to(tl.int64) * stride_steps + head
    beta = tl.where(is_t, sigmoid(tl.load(step_ptr, mask=is_t, other=0.0).to(tl.float32)), 0.0)
    a = tl.load(step_ptr + VALUES, mask=is_t, other=0.0).to(tl.float32)
    decay_log = tl.where(is_t, rate * softplus(a + bias), 0.0)
    since = tl.cumsum(decay_log.to(tl.float64), 0)
    total = tl.sum(decay_log.to(tl.float64), 0)
    between = decays_between(since)
    wide_q, wide_k = q.to(tl.float32), k.to(tl.float32)
    of_q = tl.rsqrt(tl.sum(wide_q * wide_q, 1) + eps) * (1.0 / tl.sqrt(float(DK)))
    of_k = tl.rsqrt(tl.sum(wide_k * wide_k, 1) + eps)
    across = tl.trans(k)
    meets = tl.dot(k, across, input_precision=PRECISION) * between
    meets *= (beta * of_k)[:, None] * of_k[None, :]
    below = tl.where(i[:, None] > i[None, :], meets, 0.0)
    score = tl.dot(q, across, input_precision=PRECISION) * between
    score *= of_q[:, None] * of_k[None, :]
    is_bf16: tl.constexpr = channels_ptr.dtype.element_ty == tl.bfloat16
    inverse = _inverse_of_unit_lower(below, is_bf16, PRECISION) * beta[None, :]
    place = chunk.to(tl.int64) * VALUES + head
    square = place * (PARTS * CHUNK * CHUNK) + i[:, None] * CHUNK + i[None, :]
    _store_parts(inverses_ptr + square, inverse, PARTS, CHUNK)
    _store_parts(scores_ptr + square, score, PARTS, CHUNK)
    # Of products of the state with keys and with queries, of what a correction leaves in the state,
    # and of the state.
    factor_ptr = factors_ptr + place * (4 * CHUNK) + i
    kept = tl.exp(since.to(tl.float32))
    tl.store(factor_ptr, kept * of_k)
    tl.store(factor_ptr + CHUNK, kept * of_q)
    tl.store(factor_ptr + 2 * CHUNK, tl.exp((total - since).to(tl.float32)) * of_k)
    tl.store(factor_ptr + 3 * CHUNK, kept)


@triton.jit
def _follow_kernel(
    channels_ptr: tl.tensor,
    factors_ptr: tl.tensor,
    inverses_ptr: tl.tensor,
    scores_ptr: tl.tensor,
    states_ptr: tl.tensor,
    before_ptr: tl.tensor,
    after_ptr: tl.tensor,
    first_ptr: tl.tensor,
    begin_ptr: tl.tensor,
    end_ptr: tl.tensor,
    out_ptr: tl.tensor,
    stride_channels: tl.tensor,
    stride_states: tl.tensor,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CHUNK: tl.constexpr,
    PARTS: tl.constexpr,  # of the numbers of inverses and scores
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    head = tl.program_id(1)
    segment = tl.program_id(2)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    begin, end = tl.load(begin_ptr + segment), tl.load(end_ptr + segment)
    if end <= begin + 1:
        return
    i, d = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    v = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_d, is_v = d < DK, v < DV
    num_old = DK * (1 - tl.load(first_ptr + segment).to(tl.int32))
    # The state is held as [V, K]: its rows in memory are columns here.
    in_row = head * (DK * DV) + d[None, :] * DV + v[:, None]
    before = state_row(before_ptr, segment, stride_states)
    is_old = is_v[:, None] & (d < num_old)[None, :]
    state = tl.load(states_ptr + before + in_row, mask=is_old, other=0.0)
    first_chunk = begin // CHUNK + segment
    zeros = tl.zeros([BLOCK_V, CHUNK], tl.float32)
    for chunk in range(tl.cdiv(end - begin, CHUNK)):
        t = begin + chunk * CHUNK + i
        is_t = t < end
        token = t.to(tl.int64)
        key = token[:, None] * stride_channels + head // (VALUES // KEYS) * DK + d[None, :]
        inside = is_t[:, None] & is_d[None, :]
        q = tl.load(channels_ptr + key, mask=inside, other=0.0)
        k = tl.load(channels_ptr + KEYS * DK + key, mask=inside, other=0.0)
        values = is_v[:, None] & is_t[None, :]
        value = token[None, :] * stride_channels + 2 * KEYS * DK + head * DV + v[:, None]
        x = tl.load(channels_ptr + value, mask=values, other=0.0).to(tl.float32)
        place = (first_chunk + chunk).to(tl.int64) * VALUES + head
        factor_ptr = factors_ptr + place * (4 * CHUNK)
        square = place * (PARTS * CHUNK * CHUNK) + i[:, None] * CHUNK + i[None, :]
        of_k, of_q = tl.load(factor_ptr + i), tl.load(factor_ptr + CHUNK + i)
        left, kept = tl.load(factor_ptr + 2 * CHUNK + i), tl.load(factor_ptr + 4 * CHUNK - 1)
        x -= of_k[None, :] * weighted(state, tl.trans(k), zeros, PRECISION)
        corrections = _times(x, inverses_ptr + square, zeros, PARTS, CHUNK, PRECISION)
        y = of_q[None, :] * weighted(state, tl.trans(q), zeros, PRECISION)
        y = _times(corrections, scores_ptr + square, y, PARTS, CHUNK, PRECISION)
        tl.store(out_ptr + (token[None, :] * VALUES + head) * DV + v[:, None], y, mask=values)
        state = weighted(left[None, :] * corrections, k, kept * state, PRECISION)
    after = state_row(after_ptr, segment, stride_states)
    tl.store(states_ptr + after + in_row, state, mask=is_v[:, None] & is_d[None, :])
