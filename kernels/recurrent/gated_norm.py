# mypy: disable-error-code="untyped-decorator"
"""RMS norm of each group of a row, with a gate, after a recurrence.

    x [T, G N], gate [T, G N], weight [N] or [G N]  ->  [T, G N] in the type of the gate

With the gate first it is `selective_scan.gated_rms_norm`: the norm of x * silu(gate), rounded, then
the weight. Otherwise it is `delta_rule.gated_rms_norm`: the norm of x, the weight, then silu(gate).
Both compute in float32.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.pdl import has_pdl, launch_options
from kernels.recurrent.functions import sigmoid

_TILE = 1024  # numbers of a program, if a group is not larger


def gated_rms_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    num_groups: int,
    eps: float,
    *,
    gate_first: bool,
) -> torch.Tensor:
    """Returns the normed and gated rows; a weight of one group's size is that of all groups."""
    num_rows, width = x.shape
    size = width // num_groups
    if gate.shape != x.shape or x.stride(1) != 1 or gate.stride(1) != 1:
        raise ValueError(f"x {tuple(x.shape)} and gate {tuple(gate.shape)} must have equal rows")
    if size * num_groups != width or weight.shape not in ((size,), (width,)):
        raise ValueError(f"{num_groups} groups of {width} do not fit a weight {weight.shape}")
    out = torch.empty_like(gate, memory_format=torch.contiguous_format)
    block = triton.next_power_of_2(size)
    block_g = min(triton.next_power_of_2(num_groups), max(1, _TILE // block))
    _gated_norm_kernel[(num_rows, triton.cdiv(num_groups, block_g))](
        x, gate, weight, out,
        eps,
        x.stride(0),
        gate.stride(0),
        G=num_groups,
        N=size,
        OF_GROUP=size if len(weight) == width else 0,
        BLOCK_G=block_g,
        BLOCK_N=block,
        GATE_FIRST=gate_first,
        PDL=has_pdl(x),
        num_warps=min(16, max(1, block_g * block // 256)),
        **launch_options(x),
    )  # fmt: skip
    return out


@triton.jit
def _gated_norm_kernel(
    x_ptr: tl.tensor,
    gate_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    eps: tl.tensor,
    stride_x: tl.tensor,
    stride_gate: tl.tensor,
    G: tl.constexpr,
    N: tl.constexpr,
    OF_GROUP: tl.constexpr,  # from one group's weight to the next one's
    BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    group = (tl.program_id(1) * BLOCK_G + tl.arange(0, BLOCK_G))[:, None]
    i = tl.arange(0, BLOCK_N)[None, :]
    inside = (group < G) & (i < N)
    weight = tl.load(weight_ptr + group * OF_GROUP + i, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    at = group * N + i
    x = tl.load(x_ptr + row * stride_x + at, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * stride_gate + at, mask=inside, other=0.0).to(tl.float32)
    gate *= sigmoid(gate)
    if GATE_FIRST:
        x *= gate
    x *= tl.rsqrt(tl.sum(x * x, 1) / N + eps)[:, None]
    if GATE_FIRST:
        x = x.to(out_ptr.dtype.element_ty).to(tl.float32) * weight
    else:
        x *= weight * gate
    tl.store(out_ptr + row * (G * N) + at, x.to(out_ptr.dtype.element_ty), mask=inside)
