# mypy: disable-error-code="untyped-decorator"
"""The RMS norm of a part's output, added to the residual stream, and the next part's norm of that.

    x [T, N], weight [N], residual [T, N]  ->  scale * norm(x) + residual [T, N]
    with next_weight [N]                   ->  and the norm of that sum [T, N]

Statistics and the sum are float32. What is added is rounded before, as `rms_norm` rounds it, unless
the compiler fuses the product and the sum; the second norm is of the sum before rounding. Weights
are of the type of x, or float32.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.norm.rms_norm import check, check_residual, normed_row, num_warps
from kernels.pdl import has_pdl, launch_options


def add_output_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor,
    eps: float,
    scale: float = 1.0,
    next_weight: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns (the sum, its norm if `next_weight` is given); does not modify the inputs."""
    for each in (weight, next_weight):
        if each is not None:
            check(x, each)
    check_residual(x, residual)
    num_rows, width = x.shape
    total = torch.empty_like(residual)
    normed = None if next_weight is None else torch.empty_like(residual)
    if num_rows == 0:
        return total, normed
    block = triton.next_power_of_2(width)
    _add_output_norm_kernel[(num_rows,)](
        x, weight, residual, next_weight, total, normed,
        eps,
        x.stride(0),
        N=width,
        BLOCK=block,
        SCALE=scale,
        HAS_NEXT=next_weight is not None,
        PDL=has_pdl(x),
        num_warps=num_warps(block),
        **launch_options(x),
    )  # fmt: skip
    return total, normed


@triton.jit
def _add_output_norm_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    next_ptr: tl.tensor,
    total_ptr: tl.tensor,
    normed_ptr: tl.tensor,
    eps: tl.tensor,
    stride_x: tl.tensor,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    SCALE: tl.constexpr,
    HAS_NEXT: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < N
    weight = tl.load(weight_ptr + i, mask=inside, other=0.0)
    if HAS_NEXT:
        next_weight = tl.load(next_ptr + i, mask=inside, other=0.0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    x = tl.load(x_ptr + row * stride_x + i, mask=inside, other=0.0).to(tl.float32)
    residual = tl.load(residual_ptr + row * N + i, mask=inside, other=0.0).to(tl.float32)
    added = normed_row(x, weight, eps, N).to(total_ptr.dtype.element_ty).to(tl.float32)
    total = added * SCALE + residual
    tl.store(total_ptr + row * N + i, total.to(total_ptr.dtype.element_ty), mask=inside)
    if HAS_NEXT:
        normed = normed_row(total, next_weight, eps, N)
        tl.store(normed_ptr + row * N + i, normed.to(normed_ptr.dtype.element_ty), mask=inside)
