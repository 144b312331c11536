# mypy: disable-error-code="untyped-decorator"
"""The gated delta rule of segments that have one token; see `delta_net`.

A program has some columns of a head's state: it reads them once and writes them once.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.pdl import has_pdl, launch_options
from kernels.recurrent.delta_rule import EPS, DeltaHeads
from kernels.recurrent.functions import sigmoid, softplus, state_row
from kernels.recurrent.segments import Segments

_MAX_BLOCK_V = 32  # columns of a program: one row has enough programs, and few registers are used


def update_by_one_token(
    channels: torch.Tensor,
    steps: torch.Tensor,
    heads: DeltaHeads,
    states: torch.Tensor,
    segments: Segments,
    out: torch.Tensor,
) -> None:
    """Writes outputs and states of the segments that have one token; leaves the others alone."""
    block_v = min(_MAX_BLOCK_V, triton.next_power_of_2(heads.value_dim))
    num_tiles = triton.cdiv(heads.value_dim, block_v)
    _step_kernel[(num_tiles, heads.num_values, len(segments))](
        channels, steps, heads.rates, heads.step_bias, states,
        segments.before, segments.after, segments.is_first, segments.begin, segments.end, out,
        channels.stride(0),
        steps.stride(0),
        states.stride(0),
        EPS,
        KEYS=heads.num_keys,
        VALUES=heads.num_values,
        DK=heads.key_dim,
        DV=heads.value_dim,
        BLOCK_K=triton.next_power_of_2(heads.key_dim),
        BLOCK_V=block_v,
        HAS_BOUNDS=segments.bounds is not None,
        PDL=has_pdl(channels),
        num_warps=4,
        **launch_options(channels),
    )  # fmt: skip


@triton.jit
def _step_kernel(
    channels_ptr: tl.tensor,
    steps_ptr: tl.tensor,
    rates_ptr: tl.tensor,
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
    eps: tl.tensor,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    HAS_BOUNDS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    head = tl.program_id(1)
    segment = tl.program_id(2)
    d = tl.arange(0, BLOCK_K)
    v = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_d, is_v = d < DK, v < DV
    rate, bias = tl.load(rates_ptr + head), tl.load(bias_ptr + head)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = segment
    if HAS_BOUNDS:
        token = tl.load(begin_ptr + segment)
        if tl.load(end_ptr + segment) != token + 1:
            return
    num_old = DK * (1 - tl.load(first_ptr + segment).to(tl.int32))
    in_row = head * (DK * DV) + d[:, None] * DV + v[None, :]
    inside = is_d[:, None] & is_v[None, :]
    before = state_row(before_ptr, segment, stride_states)
    is_old = (d < num_old)[:, None] & is_v[None, :]
    state = tl.load(states_ptr + before + in_row, mask=is_old, other=0.0)
    row_ptr = channels_ptr + token.to(tl.int64) * stride_channels
    key = head // (VALUES // KEYS) * DK + d
    q = tl.load(row_ptr + key, mask=is_d, other=0.0).to(tl.float32)
    k = tl.load(row_ptr + KEYS * DK + key, mask=is_d, other=0.0).to(tl.float32)
    x = tl.load(row_ptr + 2 * KEYS * DK + head * DV + v, mask=is_v, other=0.0).to(tl.float32)
    q *= tl.rsqrt(tl.sum(q * q, 0) + eps) * (1.0 / tl.sqrt(float(DK)))
    k *= tl.rsqrt(tl.sum(k * k, 0) + eps)
    step_ptr = steps_ptr + token.to(tl.int64) * stride_steps + head
    beta = sigmoid(tl.load(step_ptr).to(tl.float32))
    decay_log = rate * softplus(tl.load(step_ptr + VALUES).to(tl.float32) + bias)
    state *= tl.exp(decay_log)
    correction = beta * (x - tl.sum(state * k[:, None], 0))
    state += k[:, None] * correction[None, :]
    y = tl.sum(state * q[:, None], 0)
    tl.store(out_ptr + (token.to(tl.int64) * VALUES + head) * DV + v, y, mask=is_v)
    after = state_row(after_ptr, segment, stride_states)
    tl.store(states_ptr + after + in_row, state, mask=inside)
