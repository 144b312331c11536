# mypy: disable-error-code="untyped-decorator"
"""Linear layer for up to 32 rows, where the time is that of reading the weight once.

    x [M, K] with M <= 32, weight [N, K]  ->  y = x @ weight.T  [M, N]
    with norm_weight [K]:  y = rms_norm(x) @ weight.T
    with gated:            silu(gate) * up  [M, N / 2], where gate and up are the halves of y;
                           with gelu, by tanh, in place of silu
    with residual [M, N]:  y + residual
    with inboxes:          y, also sent to the peers for `all_reduce.receive`

The norm takes no extra pass: its factor is one number per row, so the GEMM multiplies
`x * norm_weight` and scales the result. A program owns whole rows of the weight; it requests its
first tile before it waits for the kernel that computes `x`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.comm.exchange import deliver, slot_start, to_words, word
from kernels.comm.inboxes import Inboxes
from kernels.gemm import operands
from kernels.norm.silu_and_mul import activated
from kernels.pdl import has_pdl, launch_options

MAX_ROWS = 32
_SMALL_LAYER = 2**23  # elements of the weight


@dataclass(frozen=True, slots=True)
class _Config:
    block_n: int
    k_slices: int  # slices of K, at least one warp each
    block_k: int
    num_warps: int


def _config(m: int, n: int, k: int, gated: bool, itemsize: int) -> _Config:
    """The launch configuration; measured on H200 with the layers of Qwen3 0.6B and 8B."""
    if m == 1:
        block_k = min(4096, triton.next_power_of_2(k))
        tile = 4096 if gated and k <= 1024 else 8192
        return _Config(max(2, min(16, tile // block_k)), 1, block_k, num_warps=4)
    if itemsize == 4:  # no tensor cores, twice the shared memory
        return _Config(8, 4, 64, num_warps=4)
    if k <= 1024:
        return _Config(16, 4, 256, num_warps=4)
    if n * k <= _SMALL_LAYER:
        return _Config(8, 8, 256, num_warps=8)
    return _Config(16, 8, 128, num_warps=8)


def pays(m: int, n: int, k: int) -> bool:
    """True if this kernel is faster than the library: for one row, or few rows of a small layer.

    With more than 16 rows, or a weight of many megabytes, the library hides its overhead.
    """
    return m == 1 or (m <= 16 and n * k <= _SMALL_LAYER)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    gelu: bool = False,
    residual: torch.Tensor | None = None,
    inboxes: Inboxes | None = None,
    slot: int = 0,
) -> torch.Tensor:
    """GEMM with fused neighbouring operations; sums are float32, rounded once at the end."""
    m, n, k = operands.check(
        x, weight, gated, residual, MAX_ROWS, bias=bias, norm_weight=norm_weight
    )
    if bias is not None and (gated or bias.shape != (n,)):
        raise ValueError(f"bias must be [{n}], and a gated product has none")
    if norm_weight is not None and norm_weight.shape != (k,):
        raise ValueError(f"norm_weight must be [{k}]")

    out = x.new_empty((m, n))
    if inboxes is not None and not inboxes.hold(out.nbytes):
        raise ValueError(f"the product has {out.nbytes} bytes, an inbox {inboxes.num_bytes}")
    exchange = _exchange(out, inboxes, slot)
    config = _config(m, n, k, gated, x.element_size())
    common = dict(
        N=n,
        K=k,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        NORM=norm_weight is not None,
        GATED=gated,
        GELU=gelu,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        RANK=0 if inboxes is None else inboxes.rank,
        SIZE=1 if inboxes is None else inboxes.size,
        WORD=word(x),
        PDL=has_pdl(x),
        num_warps=config.num_warps,
        **launch_options(x),
    )
    grid = (triton.cdiv(n, config.block_n),)
    if m == 1:
        _row_kernel[grid](x, weight, bias, norm_weight, residual, out, *exchange, eps, **common)
    else:
        _rows_kernel[grid](
            x, weight, bias, norm_weight, residual, out, *exchange, eps, m, x.stride(0),
            BLOCK_M=max(8, triton.next_power_of_2(m)), SLICES=config.k_slices, **common,
        )  # fmt: skip
    return out


def _exchange(
    out: torch.Tensor, inboxes: Inboxes | None, slot: int
) -> tuple[torch.Tensor | None, int, int]:
    """Arguments of `deliver`: addresses, start of the slot, capacity of an inbox in elements."""
    if inboxes is None:
        return None, 0, 0
    start = slot_start(inboxes, slot, out.element_size())
    return inboxes.addresses, start, inboxes.num_bytes // out.element_size()


@triton.jit
def _row_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    out_ptr: tl.tensor,
    addresses_ptr: tl.tensor,
    slot_start: tl.tensor,
    capacity: tl.tensor,
    eps: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    WORD: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One row, without tensor cores: weights go from memory to registers and are used once."""
    if PDL:
        gdc_launch_dependents()
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    is_n = n < N
    w_ptr = weight_ptr + n.to(tl.int64)[:, None] * K + k[None, :]
    w = tl.load(w_ptr, mask=is_n[:, None] & (k < K)[None, :], other=0.0)  # [BLOCK_N, BLOCK_K]
    if GATED:
        u = tl.load(w_ptr + N * K, mask=is_n[:, None] & (k < K)[None, :], other=0.0)
    if NORM:
        scale = tl.load(norm_ptr + k, mask=k < K, other=0.0)
    if PDL:
        gdc_wait()
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    acc_up = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    square = tl.zeros([BLOCK_K], tl.float32)
    for k0 in tl.static_range(0, K, BLOCK_K):
        is_k = k0 + k < K
        x = tl.load(x_ptr + k0 + k, mask=is_k, other=0.0).to(tl.float32)
        if k0 > 0:
            w = tl.load(w_ptr + k0, mask=is_n[:, None] & is_k[None, :], other=0.0)
            if GATED:
                u = tl.load(w_ptr + N * K + k0, mask=is_n[:, None] & is_k[None, :], other=0.0)
            if NORM:
                scale = tl.load(norm_ptr + k0 + k, mask=is_k, other=0.0)
        if NORM:
            square += x * x
            x *= scale.to(tl.float32)
        acc += w.to(tl.float32) * x[None, :]
        if GATED:
            acc_up += u.to(tl.float32) * x[None, :]
    y = tl.sum(acc, 1)
    if NORM:
        factor = tl.rsqrt(tl.sum(square, 0) / K + eps)
        y *= factor
    if GATED:
        up = tl.sum(acc_up, 1)
        if NORM:
            up *= factor
        y = activated(y, up, GELU)
    if HAS_BIAS:
        y += tl.load(bias_ptr + n, mask=is_n, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        y += tl.load(residual_ptr + n, mask=is_n, other=0.0).to(tl.float32)
    y = y.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + n, y, mask=is_n)
    if SIZE > 1:
        words = to_words(y, WORD)
        deliver(words, n, is_n, addresses_ptr, slot_start, capacity, RANK, SIZE)


@triton.jit(do_not_specialize=["M"])  # one kernel for all numbers of rows
def _rows_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    out_ptr: tl.tensor,
    addresses_ptr: tl.tensor,
    slot_start: tl.tensor,
    capacity: tl.tensor,
    eps: tl.tensor,
    M: tl.tensor,
    stride_x: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SLICES: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    WORD: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Several rows: a batched GEMM over slices of K, so that each warp has its own slice."""
    if PDL:
        gdc_launch_dependents()
    STEP: tl.constexpr = SLICES * BLOCK_K
    m = tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = (
        tl.arange(0, SLICES)[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    )  # [SLICES, BLOCK_K]
    is_m = (m < M)[None, None, :]
    is_n = (n < N)[None, :, None]
    w_ptr = weight_ptr + n.to(tl.int64)[None, :, None] * K + k[:, None, :]
    x_ptrs = x_ptr + m[None, None, :] * stride_x + k[:, :, None]
    w = tl.load(w_ptr, mask=is_n & (k < K)[:, None, :], other=0.0)  # [SLICES, BLOCK_N, BLOCK_K]
    if GATED:
        u = tl.load(w_ptr + N * K, mask=is_n & (k < K)[:, None, :], other=0.0)
    if PDL:
        gdc_wait()
    acc = tl.zeros([SLICES, BLOCK_N, BLOCK_M], tl.float32)
    acc_up = tl.zeros([SLICES, BLOCK_N, BLOCK_M], tl.float32)
    square = tl.zeros([SLICES, BLOCK_K, BLOCK_M], tl.float32)
    for k0 in tl.static_range(0, K, STEP):
        is_k = k0 + k < K
        x = tl.load(x_ptrs + k0, mask=is_m & is_k[:, :, None], other=0.0)
        if NORM:
            scale = tl.load(norm_ptr + k0 + k, mask=is_k, other=0.0)[:, :, None]
            xf = x.to(tl.float32)
            square += xf * xf
            x = (xf * scale.to(tl.float32)).to(x.dtype)
        if k0 > 0:
            w = tl.load(w_ptr + k0, mask=is_n & is_k[:, None, :], other=0.0)
            if GATED:
                u = tl.load(w_ptr + N * K + k0, mask=is_n & is_k[:, None, :], other=0.0)
        acc = tl.dot(w, x, acc, input_precision="ieee")
        if GATED:
            acc_up = tl.dot(u, x, acc_up, input_precision="ieee")
    y = tl.sum(acc, 0)  # [BLOCK_N, BLOCK_M]
    if NORM:
        factor = tl.rsqrt(tl.sum(tl.sum(square, 1), 0) / K + eps)[None, :]
        y *= factor
    if GATED:
        up = tl.sum(acc_up, 0)
        if NORM:
            up *= factor
        y = activated(y, up, GELU)
    to = m[None, :] * N + n[:, None]
    inside = (m < M)[None, :] & (n < N)[:, None]
    if HAS_BIAS:
        y += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    if HAS_RESIDUAL:
        y += tl.load(residual_ptr + to, mask=inside, other=0.0).to(tl.float32)
    y = y.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + to, y, mask=inside)
    if SIZE > 1:
        words = to_words(y, WORD)
        deliver(words, to, inside, addresses_ptr, slot_start, capacity, RANK, SIZE)
