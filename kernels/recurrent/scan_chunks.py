# mypy: disable-error-code="untyped-decorator"
"""The scan of Mamba-2 of segments that have more than one token, by chunks; see `mamba2`.

Within a chunk each output is a weighted sum of the inputs before it, plus what the state before the
chunk gives. A program goes from chunk to chunk with some rows of a head's state in its registers.

Products with the state are of float32 numbers; see `functions.product`.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.pdl import has_pdl, launch_options
from kernels.recurrent.functions import (
    decays_between,
    precision,
    product,
    softplus,
    state_row,
    weighted,
)
from kernels.recurrent.segments import CHUNK, Segments
from kernels.recurrent.selective_scan import ScanHeads

# Rows of a program's state, and the least columns. Products of fewer than 64 rows are not given to
# groups of warps. Those of states and channels in bfloat16, which are made of registers' numbers,
# were wrong that way, or touched memory of others (Triton 3.6, H100 and H200).
_BLOCK_P, _LEAST_BLOCK_N = 32, 64


def scan_by_chunks(
    channels: torch.Tensor,
    steps: torch.Tensor,
    heads: ScanHeads,
    states: torch.Tensor,
    segments: Segments,
    out: torch.Tensor,
) -> None:
    """Writes outputs and states of the segments of two tokens and more; leaves others alone."""
    bounds = segments.bounds
    assert bounds is not None
    is_exact = channels.dtype == torch.float32
    num_tiles = triton.cdiv(heads.head_dim, _BLOCK_P)
    _scan_chunks_kernel[(num_tiles, heads.num_heads, len(segments))](
        channels, steps, heads.parameters.decay, heads.parameters.skip, heads.step_bias, states,
        segments.before, segments.after, segments.is_first, bounds.begin, bounds.end, out,
        channels.stride(0),
        steps.stride(0),
        states.stride(0),
        H=heads.num_heads,
        P=heads.head_dim,
        G=heads.num_groups,
        N=heads.state_size,
        BLOCK_P=_BLOCK_P,
        BLOCK_N=max(_LEAST_BLOCK_N, triton.next_power_of_2(heads.state_size)),
        CHUNK=CHUNK,
        PRECISION=precision(channels),
        PDL=has_pdl(channels),
        num_warps=4,
        num_stages=1 if is_exact else 2,
        **launch_options(channels),
    )  # fmt: skip


@triton.jit
def _scan_chunks_kernel(
    channels_ptr: tl.tensor,
    steps_ptr: tl.tensor,
    decay_ptr: tl.tensor,
    skip_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    states_ptr: tl.tensor,
    before_ptr: tl.tensor,
    after_ptr: tl.tensor,
    first_ptr: tl.tensor,
    begin_ptr: tl.tensor,
    end_ptr: tl.tensor,
    out_ptr: tl.tensor,
    stride_channels: tl.tensor,
    stride_steps: tl.tensor,
    stride_states: tl.tensor,
    H: tl.constexpr,
    P: tl.constexpr,
    G: tl.constexpr,
    N: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    head = tl.program_id(1)
    segment = tl.program_id(2)
    decay, skip = tl.load(decay_ptr + head), tl.load(skip_ptr + head)
    bias = tl.load(bias_ptr + head)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    begin, end = tl.load(begin_ptr + segment), tl.load(end_ptr + segment)
    if end <= begin + 1:
        return
    i, n = tl.arange(0, CHUNK), tl.arange(0, BLOCK_N)
    p = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    is_p, is_n = p < P, n < N
    num_old = P * (1 - tl.load(first_ptr + segment).to(tl.int32))
    in_row = head * (P * N) + p[:, None] * N + n[None, :]
    before = state_row(before_ptr, segment, stride_states)
    is_old = (is_p & (p < num_old))[:, None] & is_n[None, :]
    state = tl.load(states_ptr + before + in_row, mask=is_old, other=0.0)
    for first in range(begin, end, CHUNK):
        t = first + i
        is_t = t < end
        token = t.to(tl.int64)
        inside, wanted = is_t[:, None] & is_n[None, :], is_p[:, None] & is_t[None, :]
        at = token[None, :] * stride_channels + head * P + p[:, None]
        x = tl.load(channels_ptr + at, mask=wanted, other=0.0)
        of_group = token[:, None] * stride_channels + H * P + head // (H // G) * N + n[None, :]
        b = tl.load(channels_ptr + of_group, mask=inside, other=0.0)
        c = tl.load(channels_ptr + of_group + G * N, mask=inside, other=0.0)
        step_ptr = steps_ptr + token * stride_steps + head
        dt = tl.load(step_ptr, mask=is_t, other=0.0).to(tl.float32)
        dt = tl.where(is_t, softplus(dt + bias), 0.0)
        decay_log = (decay * dt).to(tl.float64)
        since, total = tl.cumsum(decay_log, 0), tl.sum(decay_log, 0)
        weights = tl.dot(c, tl.trans(b), input_precision=PRECISION)
        weights *= decays_between(since) * dt[None, :]
        kept = tl.exp(since.to(tl.float32))[None, :]
        y = kept * weighted(state, tl.trans(c), tl.zeros([BLOCK_P, CHUNK], tl.float32), PRECISION)
        y = product(x, tl.trans(weights), y, PRECISION)
        wide = x.to(tl.float32)
        y += skip * wide
        to = token[None, :] * (H * P) + head * P + p[:, None]
        tl.store(out_ptr + to, y.to(out_ptr.dtype.element_ty), mask=wanted)
        left = wide * (dt * tl.exp((total - since).to(tl.float32)))[None, :]
        state = weighted(left, b, state * tl.exp(total.to(tl.float32)), PRECISION)
    after = state_row(after_ptr, segment, stride_states)
    tl.store(states_ptr + after + in_row, state, mask=is_p[:, None] & is_n[None, :])
