# mypy: disable-error-code="untyped-decorator"
"""The gate on what heads attended to.

    x [T, N], gate [T, N]  ->  x * sigmoid(gate)  [T, N]

The gates are a slice of the projection of queries, keys and values, whose rows are longer.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.pdl import has_pdl, launch_options

_BLOCK = 1024


def gated(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Multiplies in float32, and rounds once; does not modify x."""
    num_rows, width = x.shape
    if gate.shape != x.shape or gate.dtype != x.dtype:
        raise ValueError(f"x is {tuple(x.shape)} of {x.dtype}, gate {gate.shape}, {gate.dtype}")
    if not x.is_contiguous() or gate.stride(1) != 1:
        raise ValueError("x and rows of the gate must be contiguous")
    out = torch.empty_like(x)
    if num_rows == 0:
        return out
    _gated_kernel[(num_rows, triton.cdiv(width, _BLOCK))](
        x, gate, out, gate.stride(0),
        N=width,
        BLOCK=_BLOCK,
        PDL=has_pdl(x),
        **launch_options(x),
    )  # fmt: skip
    return out


@triton.jit
def _gated_kernel(
    x_ptr: tl.tensor,
    gate_ptr: tl.tensor,
    out_ptr: tl.tensor,
    stride_gate: tl.tensor,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < N
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    x = tl.load(x_ptr + row * N + i, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * stride_gate + i, mask=inside, other=0.0).to(tl.float32)
    out = x / (1.0 + tl.exp(-gate))
    tl.store(out_ptr + row * N + i, out.to(out_ptr.dtype.element_ty), mask=inside)
