# mypy: disable-error-code="untyped-decorator"
"""The gated activation of the feed-forward layer.

x [T, 2I]  ->  silu(x[:, :I]) * x[:, I:]  [T, I]
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.pdl import has_pdl, launch_options

_BLOCK = 1024


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Gate the second half of each row by the SiLU of the first, in float32."""
    num_rows, width = x.shape
    if width % 2 or x.stride(1) != 1:
        raise ValueError(f"want contiguous rows of even width, got {tuple(x.shape)}")
    out = x.new_empty((num_rows, width // 2))
    if num_rows == 0:
        return out
    _silu_and_mul_kernel[(num_rows, triton.cdiv(width // 2, _BLOCK))](
        x, out,
        x.stride(0),
        I=width // 2,
        BLOCK=_BLOCK,
        PDL=has_pdl(x),
        **launch_options(x),
    )  # fmt: skip
    return out


@triton.jit
def _silu_and_mul_kernel(
    x_ptr: tl.tensor,
    out_ptr: tl.tensor,
    stride_x: tl.tensor,
    I: tl.constexpr,  # noqa: E741
    BLOCK: tl.constexpr,
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
    out = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * I + i, out.to(out_ptr.dtype.element_ty), mask=inside)
