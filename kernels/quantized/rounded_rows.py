# mypy: disable-error-code="untyped-decorator"
"""Rows rounded to 8-bit floats, each with a scale of its own, and what comes after their GEMM.

    rounded      x [M, K]  ->  values e4m3 [M, K], scales [M] float32; of its norm with norm [K]
    rescaled     y [M, N], scales [M], weight_scales [N]  ->  y * both (+ bias, + residual)
    gated        y [M, N]  ->  silu(gate) * up  [M, N / 2] of the halves of the rescaled y

A GEMM in 8 bits has sums of values alone; scales are applied to them in float32. A row's scale is
that of its largest number, so no other row changes what a row is rounded to.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.fp8 import MANTISSA_BITS
from kernels.pdl import has_pdl, launch_options
from kernels.quantized.float8_bytes import fp8_bytes
from kernels.quantized.scaled import FLOAT8, LARGEST

_MAX_WIDTH = 32768
_BLOCK = 1024


def rounded(
    x: torch.Tensor, norm: torch.Tensor | None = None, eps: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """(values, scales); a row that is not finite has values that are not."""
    num_rows, width = x.shape
    if x.stride(1) != 1 or width > _MAX_WIDTH:
        raise ValueError(f"want contiguous rows of at most {_MAX_WIDTH}, not {tuple(x.shape)}")
    values = torch.empty((num_rows, width), dtype=FLOAT8, device=x.device)
    scales = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(width)
    if num_rows:
        _round_kernel[(num_rows,)](
            x, norm, values.view(torch.uint8), scales, eps, x.stride(0),
            N=width, BLOCK=block, HAS_NORM=norm is not None, LARGEST=LARGEST,
            MANTISSA=MANTISSA_BITS[FLOAT8], PDL=has_pdl(x),
            num_warps=min(16, max(1, block // 512)), **launch_options(x),
        )  # fmt: skip
    return values, scales


def rescaled(
    y: torch.Tensor,
    scales: torch.Tensor,
    weight_scales: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Contiguous y [M, N], in place."""
    num_rows, width = y.shape
    _rescale_kernel[(num_rows, triton.cdiv(width, _BLOCK))](
        y, scales, weight_scales, bias, residual,
        N=width, BLOCK=_BLOCK, HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None,
        PDL=has_pdl(y), **launch_options(y),
    )  # fmt: skip
    return y


def gated(y: torch.Tensor, scales: torch.Tensor, weight_scales: torch.Tensor) -> torch.Tensor:
    """Contiguous y [M, N] -> [M, N / 2]."""
    num_rows, width = y.shape
    out = y.new_empty((num_rows, width // 2))
    _gated_kernel[(num_rows, triton.cdiv(width // 2, _BLOCK))](
        y, scales, weight_scales, out, HALF=width // 2, BLOCK=_BLOCK,
        PDL=has_pdl(y), **launch_options(y),
    )  # fmt: skip
    return out


@triton.jit
def _round_kernel(
    x_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    values_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    eps: tl.tensor,
    stride_x: tl.tensor,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_NORM: tl.constexpr,
    LARGEST: tl.constexpr,
    MANTISSA: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < N
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    given = tl.load(x_ptr + row * stride_x + i, mask=inside, other=0.0)
    x = given.to(tl.float32)
    if HAS_NORM:
        x *= tl.rsqrt(tl.sum(x * x, 0) / N + eps)
        weight = tl.load(norm_ptr + i, mask=inside, other=0.0)
        normed = x.to(given.dtype).to(tl.float32) * weight.to(tl.float32)
        x = normed.to(given.dtype).to(tl.float32)
    largest = tl.max(tl.abs(x), 0)
    num_bad = tl.sum((tl.abs(x) < float("inf")).to(tl.int32) ^ 1, 0)  # NaN compares false
    scale = tl.where(largest > 0.0, largest / LARGEST, 1.0)
    scale = tl.where(num_bad > 0, float("nan"), scale)
    tl.store(scales_ptr + row, scale)
    values = fp8_bytes(x, 1.0 / scale, MANTISSA)
    tl.store(values_ptr + row * N + i, values, mask=inside)


@triton.jit
def _rescale_kernel(
    y_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    weight_scales_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < N
    by_output = tl.load(weight_scales_ptr + i, mask=inside, other=0.0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    at = row * N + i
    y = tl.load(y_ptr + at, mask=inside, other=0.0).to(tl.float32)
    y = y * tl.load(scales_ptr + row) * by_output
    if HAS_BIAS:
        y += tl.load(bias_ptr + i, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        y += tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _gated_kernel(
    y_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    weight_scales_ptr: tl.tensor,
    out_ptr: tl.tensor,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < HALF
    gate_scale = tl.load(weight_scales_ptr + i, mask=inside, other=0.0)
    up_scale = tl.load(weight_scales_ptr + HALF + i, mask=inside, other=0.0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    scale = tl.load(scales_ptr + row)
    gate = tl.load(y_ptr + row * 2 * HALF + i, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(y_ptr + row * 2 * HALF + HALF + i, mask=inside, other=0.0).to(tl.float32)
    gate *= scale * gate_scale
    up *= scale * up_scale
    out = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * HALF + i, out.to(out_ptr.dtype.element_ty), mask=inside)
