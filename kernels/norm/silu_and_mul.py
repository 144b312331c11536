# mypy: disable-error-code="untyped-decorator"
"""Gated activation of the MLP.

    x [T, 2I]  ->  silu(x[:, :I]) * x[:, I:]  [T, I], or with gelu (by tanh) in place of silu

With rms_of [T, N], each row of x is first divided by the RMS of that row of rms_of: an RMS norm
with its weight folded into the preceding GEMM's.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.norm.rms_norm import FACTOR_STEP, rms_factor
from kernels.pdl import has_pdl, launch_options

_BLOCK = 1024
# Used if it divides the width: the row of rms_of is then read by fewer programs.
_WIDE_BLOCK = 2048


def silu_and_mul(
    x: torch.Tensor, rms_of: torch.Tensor | None = None, eps: float = 0.0, gelu: bool = False
) -> torch.Tensor:
    """Multiplies the second half of each row by the SiLU or GELU of the first, in float32."""
    num_rows, width = x.shape
    if width % 2 or x.stride(1) != 1:
        raise ValueError(f"want contiguous rows of even width, got {tuple(x.shape)}")
    if rms_of is not None and (len(rms_of) != num_rows or not rms_of.is_contiguous()):
        raise ValueError(f"rms_of must be contiguous [{num_rows}, N], got {tuple(rms_of.shape)}")
    out = x.new_empty((num_rows, width // 2))
    if num_rows == 0:
        return out
    block = _BLOCK if width // 2 % _WIDE_BLOCK else _WIDE_BLOCK
    _silu_and_mul_kernel[(num_rows, triton.cdiv(width // 2, block))](
        x, rms_of, out,
        x.stride(0),
        eps,
        I=width // 2,
        N=0 if rms_of is None else rms_of.shape[1],
        GELU=gelu,
        BLOCK=block,
        STEP=FACTOR_STEP,
        PDL=has_pdl(x),
        **launch_options(x),
    )  # fmt: skip
    return out


@triton.jit
def _silu_and_mul_kernel(
    x_ptr: tl.tensor,
    rms_ptr: tl.tensor,
    out_ptr: tl.tensor,
    stride_x: tl.tensor,
    eps: tl.tensor,
    I: tl.constexpr,  # noqa: E741
    N: tl.constexpr,  # 0: rows are not divided
    GELU: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < I
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    gate = tl.load(x_ptr + row * stride_x + i, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * stride_x + I + i, mask=inside, other=0.0).to(tl.float32)
    if N > 0:
        factor = rms_factor(rms_ptr + row * N, eps, N, STEP)
        gate *= factor
        up *= factor
    out = activated(gate, up, GELU)
    tl.store(out_ptr + row * I + i, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def activated(gate: tl.tensor, up: tl.tensor, GELU: tl.constexpr) -> tl.tensor:
    """Returns silu(gate) * up, or with gelu by tanh; in float32."""
    steepness = gate
    if GELU:  # gelu by tanh is a SiLU whose sigmoid has another argument: 2 u in place of x
        steepness = 1.5957691216057308 * gate * (1.0 + 0.044715 * gate * gate)
        steepness = tl.maximum(steepness, -80.0)  # beyond it is 0, and the exponential overflows
    return gate / (1.0 + tl.exp(-steepness)) * up
