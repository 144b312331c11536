# mypy: disable-error-code="untyped-decorator"
"""RMS norm over the last dimension, alone or after adding the residual stream.

    x [T, N], weight [N]                    ->  normed [T, N]
    x [T, N], residual [T, N], weight [N]   ->  normed [T, N], scale * x + residual [T, N]

Statistics and the sum are float32; the norm is of the sum before rounding. The weight is of the
type of x, or float32.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.pdl import has_pdl, launch_options

_MAX_WIDTH = 32768
# Elements of a row per iteration, for kernels that compute the factor alone.
FACTOR_STEP = 1024


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Returns `x / rms(x) * weight`; does not modify x."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _launch(x, None, weight, eps, out, None)
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, scale: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the norm of `scale * x + residual`, and the sum; does not modify the inputs."""
    check_residual(x, residual)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    total = torch.empty_like(residual)
    _launch(x, residual, weight, eps, out, total, scale)
    return out, total


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    total: torch.Tensor | None,
    scale: float = 1.0,
) -> None:
    check(x, weight)
    num_rows, width = x.shape
    if num_rows == 0:
        return
    block = triton.next_power_of_2(width)
    _rms_norm_kernel[(num_rows,)](
        x, residual, weight, out, total,
        eps,
        x.stride(0),
        N=width,
        BLOCK=block,
        HAS_RESIDUAL=residual is not None,
        SCALE=scale,
        PDL=has_pdl(x),
        num_warps=num_warps(block),
        **launch_options(x),
    )  # fmt: skip


def check(x: torch.Tensor, weight: torch.Tensor) -> None:
    """Raises ValueError if rows x [T, N] cannot be normed with the weight [N]."""
    width = x.shape[1]
    if weight.shape != (width,) or not weight.is_contiguous():
        raise ValueError(f"weight must be contiguous [{width}], got {tuple(weight.shape)}")
    if weight.dtype not in (x.dtype, torch.float32):
        raise ValueError(f"weight must be of {x.dtype} or float32, got {weight.dtype}")
    if x.stride(1) != 1:
        raise ValueError("rows of x must be contiguous")
    if width > _MAX_WIDTH:
        raise ValueError(f"rows of {width} exceed {_MAX_WIDTH}")


def check_residual(x: torch.Tensor, residual: torch.Tensor) -> None:
    """Raises ValueError if x cannot be added to the residual."""
    if x.shape != residual.shape or x.dtype != residual.dtype or not residual.is_contiguous():
        raise ValueError(f"residual must be contiguous {tuple(x.shape)} of {x.dtype}")


def num_warps(block: int) -> int:
    """The warps of a program that norms a row of up to `block` elements."""
    return min(16, max(1, block // 512))


@triton.jit
def _rms_norm_kernel(
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    total_ptr: tl.tensor,
    eps: tl.tensor,
    stride_x: tl.tensor,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    SCALE: tl.constexpr,  # of x before the residual is added; 1.0: none
    PDL: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < N
    weight = tl.load(weight_ptr + i, mask=inside, other=0.0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    x = tl.load(x_ptr + row * stride_x + i, mask=inside, other=0.0).to(tl.float32)
    if SCALE != 1.0:
        x *= SCALE
    if HAS_RESIDUAL:
        x += tl.load(residual_ptr + row * N + i, mask=inside, other=0.0).to(tl.float32)
        tl.store(total_ptr + row * N + i, x.to(total_ptr.dtype.element_ty), mask=inside)
    normed = normed_row(x, weight, eps, N)
    tl.store(out_ptr + row * N + i, normed.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def normed_row(x: tl.tensor, weight: tl.tensor, eps: tl.tensor, N: tl.constexpr) -> tl.tensor:
    """Returns the norm of a row x of float32 with N elements; zeros may follow."""
    normed = x * tl.rsqrt(tl.sum(x * x, 0) / N + eps)
    return normed.to(weight.dtype) * weight  # rounded before, unless the weight is float32


@triton.jit
def rms_factor(
    row_ptr: tl.tensor, eps: tl.tensor, N: tl.constexpr, STEP: tl.constexpr
) -> tl.tensor:
    """Returns 1 / rms of a contiguous row [N], without the norm's weight."""
    square = tl.zeros([STEP], tl.float32)
    for first in tl.static_range(0, N, STEP):
        i = first + tl.arange(0, STEP)
        x = tl.load(row_ptr + i, mask=i < N, other=0.0).to(tl.float32)
        square += x * x
    return tl.rsqrt(tl.sum(square, 0) / N + eps)
