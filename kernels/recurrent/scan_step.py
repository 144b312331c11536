# mypy: disable-error-code="untyped-decorator"
"""The scan of Mamba-2 of segments that have one token; see `mamba2`.

A program has some rows of a head's state: it reads them once and writes them once.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.pdl import has_pdl, launch_options
from kernels.recurrent.functions import softplus, state_row
from kernels.recurrent.segments import Segments
from kernels.recurrent.selective_scan import ScanHeads

_MAX_BLOCK_P = 32  # rows of a program's state


def scan_one_token(
    channels: torch.Tensor,
    steps: torch.Tensor,
    heads: ScanHeads,
    states: torch.Tensor,
    segments: Segments,
    out: torch.Tensor,
) -> None:
    """Writes outputs and states of the segments that have one token; leaves the others alone."""
    block_p = min(_MAX_BLOCK_P, triton.next_power_of_2(heads.head_dim))
    num_tiles = triton.cdiv(heads.head_dim, block_p)
    _scan_step_kernel[(num_tiles, heads.num_heads, len(segments))](
        channels, steps, heads.parameters.decay, heads.parameters.skip, heads.step_bias, states,
        segments.before, segments.after, segments.is_first, segments.begin, segments.end, out,
        channels.stride(0),
        steps.stride(0),
        states.stride(0),
        H=heads.num_heads,
        P=heads.head_dim,
        G=heads.num_groups,
        N=heads.state_size,
        BLOCK_P=block_p,
        BLOCK_N=triton.next_power_of_2(heads.state_size),
        HAS_BOUNDS=segments.bounds is not None,
        PDL=has_pdl(channels),
        num_warps=4,
        **launch_options(channels),
    )  # fmt: skip


@triton.jit
def _scan_step_kernel(
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
    HAS_BOUNDS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    head = tl.program_id(1)
    segment = tl.program_id(2)
    p = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    n = tl.arange(0, BLOCK_N)
    is_p, is_n = p < P, n < N
    decay, skip = tl.load(decay_ptr + head), tl.load(skip_ptr + head)
    bias = tl.load(bias_ptr + head)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = segment
    if HAS_BOUNDS:
        token = tl.load(begin_ptr + segment)
        if tl.load(end_ptr + segment) != token + 1:
            return
    num_old = P * (1 - tl.load(first_ptr + segment).to(tl.int32))
    in_row = head * (P * N) + p[:, None] * N + n[None, :]
    before = state_row(before_ptr, segment, stride_states)
    is_old = (is_p & (p < num_old))[:, None] & is_n[None, :]
    state = tl.load(states_ptr + before + in_row, mask=is_old, other=0.0)
    row_ptr = channels_ptr + token.to(tl.int64) * stride_channels
    x = tl.load(row_ptr + head * P + p, mask=is_p, other=0.0).to(tl.float32)
    b_ptr = row_ptr + H * P + head // (H // G) * N + n
    b = tl.load(b_ptr, mask=is_n, other=0.0).to(tl.float32)
    c = tl.load(b_ptr + G * N, mask=is_n, other=0.0).to(tl.float32)
    dt = tl.load(steps_ptr + token.to(tl.int64) * stride_steps + head).to(tl.float32)
    dt = softplus(dt + bias)
    state = tl.exp(decay * dt) * state + (dt * x)[:, None] * b[None, :]
    y = tl.sum(state * c[None, :], 1) + skip * x
    to = token.to(tl.int64) * (H * P) + head * P + p
    tl.store(out_ptr + to, y.to(out_ptr.dtype.element_ty), mask=is_p)
    after = state_row(after_ptr, segment, stride_states)
    tl.store(states_ptr + after + in_row, state, mask=is_p[:, None] & is_n[None, :])
