# mypy: disable-error-code="untyped-decorator"
"""Rows rounded to 8-bit floats, each with a scale of its own, and what comes after their GEMM.

    rounded      x [M, K]  ->  values e4m3 [M, K], scales [M] float32; of its norm with norm [K]
    rescaled     y [M, N], scales [M], weight_scales [N]  ->  y * both (+ bias, + residual)
    rescaled_and_rounded     that, and its norm as by `rounded`, in one kernel
    gated        y [M, N]  ->  silu(gate) * up  [M, N / 2] of the halves of the rescaled y

A GEMM in 8 bits has sums of values alone; scales are applied to them in float32. A row's scale is
that of its largest number, so no other row changes what a row is rounded to.
"""

from typing import NamedTuple

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
_LEAST = tl.constexpr(1e-35)
FLOAT8_CAPABILITY = (8, 9)  # of devices that convert and multiply these numbers


class RoundedRows(NamedTuple):
    """Rows `values * scales`."""

    values: torch.Tensor  # [M, K] e4m3
    scales: torch.Tensor  # [M] float32

    @classmethod
    def empty(cls, num_rows: int, width: int, device: torch.device) -> "RoundedRows":
        """Undefined rows of so many numbers."""
        return cls(
            torch.empty((num_rows, width), dtype=FLOAT8, device=device),
            torch.empty(num_rows, dtype=torch.float32, device=device),
        )


def rounded(x: torch.Tensor, norm: torch.Tensor | None = None, eps: float = 0.0) -> RoundedRows:
    """The rows of x, or of its norm; of a row that is not finite, values that are not."""
    num_rows, width = x.shape
    if x.stride(1) != 1 or width > _MAX_WIDTH:
        raise ValueError(f"want contiguous rows of at most {_MAX_WIDTH}, not {tuple(x.shape)}")
    rows = RoundedRows.empty(num_rows, width, x.device)
    if num_rows:
        _round_kernel[(num_rows,)](
            x, norm, rows.values.view(torch.uint8), rows.scales, eps, x.stride(0),
            N=width, HAS_NORM=norm is not None, PDL=has_pdl(x),
            **_rounding(x, width), **launch_options(x),
        )  # fmt: skip
    return rows


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


def rescaled_and_rounded(
    y: torch.Tensor,
    scales: torch.Tensor,
    weight_scales: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
) -> RoundedRows:
    """Contiguous y [M, N], in place, with the residual; returns the rows of its norm."""
    num_rows, width = y.shape
    if width > _MAX_WIDTH:
        raise ValueError(f"want rows of at most {_MAX_WIDTH}, not {width}")
    rows = RoundedRows.empty(num_rows, width, y.device)
    _rescale_and_round_kernel[(num_rows,)](
        y, scales, weight_scales, bias, residual, norm, rows.values.view(torch.uint8),
        rows.scales, eps, N=width, HAS_BIAS=bias is not None, PDL=has_pdl(y),
        **_rounding(y, width), **launch_options(y),
    )  # fmt: skip
    return rows


def gated(y: torch.Tensor, scales: torch.Tensor, weight_scales: torch.Tensor) -> torch.Tensor:
    """Contiguous y [M, N] -> [M, N / 2]."""
    num_rows, width = y.shape
    out = y.new_empty((num_rows, width // 2))
    _gated_kernel[(num_rows, triton.cdiv(width // 2, _BLOCK))](
        y, scales, weight_scales, out, HALF=width // 2, BLOCK=_BLOCK,
        PDL=has_pdl(y), **launch_options(y),
    )  # fmt: skip
    return out


def _rounding(x: torch.Tensor, width: int) -> dict[str, float | int]:
    """Constants of the kernels that round."""
    block = triton.next_power_of_2(width)
    converts = x.is_cuda and torch.cuda.get_device_capability(x.device) >= FLOAT8_CAPABILITY
    return {
        "BLOCK": block, "LARGEST": LARGEST,
        "MANTISSA": 0 if converts else MANTISSA_BITS[FLOAT8],
        "num_warps": min(16, max(1, block // 512)),
    }  # fmt: skip


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
    MANTISSA: tl.constexpr,  # 0: the device has an instruction for it
    PDL: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < N
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    x = tl.load(x_ptr + row * stride_x + i, mask=inside, other=0.0)
    if HAS_NORM:
        x = _normed(x, tl.load(norm_ptr + i, mask=inside, other=0.0), eps, N)
    _round_row(x.to(tl.float32), row, i, inside, values_ptr, scales_ptr, N, LARGEST, MANTISSA)


@triton.jit
def _normed(x: tl.tensor, weight: tl.tensor, eps: tl.tensor, N: tl.constexpr) -> tl.tensor:
    """The norm of a row, rounded where a kernel that stores it would round."""
    wide = x.to(tl.float32)
    wide *= tl.rsqrt(tl.sum(wide * wide, 0) / N + eps)
    return (wide.to(x.dtype).to(tl.float32) * weight.to(tl.float32)).to(x.dtype)


@triton.jit
def _round_row(
    x: tl.tensor,
    row: tl.tensor,
    i: tl.tensor,
    inside: tl.tensor,
    values_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    N: tl.constexpr,
    LARGEST: tl.constexpr,
    MANTISSA: tl.constexpr,
) -> None:
    largest = tl.max(tl.abs(x), 0)
    num_bad = tl.sum((tl.abs(x) < float("inf")).to(tl.int32) ^ 1, 0)  # NaN compares false
    # The inverse of the scale must be finite: rows of smaller numbers become 0.
    scale = tl.where(largest > _LEAST, largest / LARGEST, 1.0)
    scale = tl.where(num_bad > 0, float("nan"), scale)
    tl.store(scales_ptr + row, scale)
    if MANTISSA == 0:  # one instruction for two numbers, in place of some twenty for one
        values = (x * (1.0 / scale)).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
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
    y = _rescaled(
        y_ptr, tl.load(scales_ptr + row), by_output, bias_ptr, residual_ptr, at, i, inside,
        HAS_BIAS, HAS_RESIDUAL,
    )  # fmt: skip
    tl.store(y_ptr + at, y, mask=inside)


@triton.jit
def _rescale_and_round_kernel(
    y_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    weight_scales_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    values_ptr: tl.tensor,
    new_scales_ptr: tl.tensor,
    eps: tl.tensor,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    LARGEST: tl.constexpr,
    MANTISSA: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < N
    by_output = tl.load(weight_scales_ptr + i, mask=inside, other=0.0)
    norm = tl.load(norm_ptr + i, mask=inside, other=0.0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    at = row * N + i
    y = _rescaled(
        y_ptr, tl.load(scales_ptr + row), by_output, bias_ptr, residual_ptr, at, i, inside,
        HAS_BIAS, True,
    )  # fmt: skip
    tl.store(y_ptr + at, y, mask=inside)
    x = _normed(tl.where(inside, y, 0.0), norm, eps, N).to(tl.float32)
    _round_row(x, row, i, inside, values_ptr, new_scales_ptr, N, LARGEST, MANTISSA)


@triton.jit
def _rescaled(
    y_ptr: tl.tensor,
    scale: tl.tensor,
    by_output: tl.tensor,
    bias_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    at: tl.tensor,
    i: tl.tensor,
    inside: tl.tensor,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
) -> tl.tensor:
    y = tl.load(y_ptr + at, mask=inside, other=0.0).to(tl.float32) * scale * by_output
    if HAS_BIAS:
        y += tl.load(bias_ptr + i, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        y += tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
    return y.to(y_ptr.dtype.element_ty)


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
