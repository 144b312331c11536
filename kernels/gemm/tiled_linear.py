# mypy: disable-error-code="untyped-decorator"
"""Linear layer for up to 32 rows, where most of the time is that of reading the weight once.

    x [M, K] with M <= 32, weight [N, K]  ->  y = x @ weight.T  [M, N]
    with residual [M, N]:  y + residual
    with gated:            silu(gate) * up  [M, N / 2], where gate and up are the halves of y;
                           with gelu, by tanh, in place of silu
    with divided:          each row of y is first divided by the RMS of its row of x: an RMS norm
                           with its weight folded into the layer's

A program moves some rows of the weight and all rows of x through a pipeline in shared memory, so
that tiles are loaded while others are multiplied. If that makes too few programs to saturate
memory, K is split, and the last program of a tile to finish adds the parts, always in the same
order.

A small layer starts while the previous kernel ends. A large one does not: it has one program per
multiprocessor, and programs that start early would crowd the few that are free, as would those of
all later kernels.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.gemm import operands
from kernels.norm.silu_and_mul import activated
from kernels.pdl import has_pdl, launch_options

MAX_ROWS = 32
_FEWEST_ROWS = 3  # below this `linear` is faster
_BLOCK_K = 128
_BLOCK_N = 64
_WIDE_BLOCK_N = 128  # for a gated layer with two waves of the other tiles
_MANY_TILES = 132
_FEW_TILES = 64  # with fewer tiles K is split
_LONG_K = 8192  # above this K is split
_LEAST_COLUMNS = 3072  # with fewer the library is faster
_SMALL_LAYER = 2**23  # elements of the weight
_SHARED_BYTES = 200 << 10


@dataclass(frozen=True, slots=True)
class _Config:
    block_n: int
    splits: int  # parts of K
    num_stages: int


def _config(n: int, k: int, gated: bool) -> _Config:
    """The launch configuration; measured on H200 with Qwen3 0.6B, 8B, and 8B on two devices."""
    if gated:
        is_wide = n // _BLOCK_N > _MANY_TILES
        return _Config(_WIDE_BLOCK_N, 1, 3) if is_wide else _Config(_BLOCK_N, 1, 4)
    tiles, splits = triton.cdiv(n, _BLOCK_N), 1
    while (tiles * splits < _FEW_TILES or k // splits > _LONG_K) and _divides(k, 2 * splits):
        splits *= 2
    return _Config(_BLOCK_N, splits, 6)


def _divides(k: int, splits: int) -> bool:
    return k % (splits * _BLOCK_K) == 0


def suits(n: int, k: int, dtype: torch.dtype) -> bool:
    """True if the kernel supports a weight [n, k] and is faster than the library with it."""
    is_half = dtype in (torch.bfloat16, torch.float16)
    return is_half and k % _BLOCK_K == 0 and n >= _LEAST_COLUMNS


def pays(weight: torch.Tensor) -> bool:
    """True if the kernel suits the weight and the weight's device."""
    n, k = weight.shape
    return suits(n, k, weight.dtype) and has_pdl(weight) and _has_room(weight)


def _has_room(weight: torch.Tensor) -> bool:
    """True if the device has shared memory for the pipeline, as data center GPUs do."""
    if weight.is_meta:
        return True
    properties = triton.runtime.driver.active.utils.get_device_properties(weight.get_device())
    return int(properties["max_shared_mem"]) >= _SHARED_BYTES


def arrivals(weight: torch.Tensor) -> torch.Tensor:
    """A counter per tile of this weight, zero between calls; may be shared in stream order."""
    num_tiles = triton.cdiv(weight.shape[0], _BLOCK_N)
    return torch.zeros(num_tiles, dtype=torch.int32, device=weight.device)


def serves(num_rows: int) -> bool:
    """True if this kernel is used for this number of rows, if `pays` holds for the weight."""
    return _FEWEST_ROWS <= num_rows <= MAX_ROWS


def counters_for(arrived: torch.Tensor | None, num_rows: int) -> torch.Tensor | None:
    """The weight's counters if this kernel is used for this number of rows; else None."""
    return arrived if serves(num_rows) else None


def tiled_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    arrived: torch.Tensor,
    *,
    residual: torch.Tensor | None = None,
    gated: bool = False,
    gelu: bool = False,
    divided: bool = False,
    eps: float = 0.0,
) -> torch.Tensor:
    """GEMM with fused neighbouring operations; sums are float32, rounded once at the end."""
    m, n, k = operands.check(x, weight, gated, residual, MAX_ROWS)
    if k % _BLOCK_K:
        raise ValueError(f"K must be a multiple of {_BLOCK_K}, got {k}")
    config = _config(n, k, gated)
    if divided and config.splits > 1:
        raise ValueError(f"rows of {k} for {n} columns are cut, and cannot be divided")
    tiles = triton.cdiv(n, config.block_n)
    if len(arrived) < tiles:
        raise ValueError(f"{len(arrived)} counters for {tiles} tiles")

    out = x.new_empty((m, n))
    block_m = 16 if m <= 16 else 32
    overlaps = has_pdl(x) and weight.numel() <= _SMALL_LAYER
    parts = None
    if config.splits > 1:
        shape = (tiles, config.splits, config.block_n, block_m)
        parts = x.new_empty(shape, dtype=torch.float32)
    _tiled_linear_kernel[(tiles, config.splits)](
        x, weight, residual, out, parts, arrived,
        eps,
        m, n, k, x.stride(0),
        BLOCK_M=block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=_BLOCK_K,
        SPLITS=config.splits,
        STAGES=config.num_stages,
        GATED=gated,
        GELU=gelu,
        DIVIDED=divided,
        HAS_RESIDUAL=residual is not None,
        PDL=has_pdl(x),
        OVERLAPS=overlaps,
        num_warps=4,
        **(launch_options(x) if overlaps else {}),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["M"])  # one kernel for all numbers of rows
def _tiled_linear_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    out_ptr: tl.tensor,
    parts_ptr: tl.tensor,
    arrived_ptr: tl.tensor,
    eps: tl.tensor,
    M: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    stride_x: tl.tensor,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    DIVIDED: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    tile = tl.program_id(0)
    split = tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
    m = tl.arange(0, BLOCK_M)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    # Rows beyond M repeat the last row and are not stored.
    rows = tl.minimum(m, M - 1)
    columns = tl.minimum(n, N - 1).to(tl.int64)
    w_ptrs = weight_ptr + columns[:, None] * K + k[None, :]  # [BLOCK_N, BLOCK_K]
    x_ptrs = x_ptr + rows[:, None] * stride_x + k[None, :]  # [BLOCK_M, BLOCK_K]
    to_up = N.to(tl.int64) * K
    if OVERLAPS:
        gdc_wait()
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    acc_up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    square = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
    first = split * (K // SPLITS)
    for k0 in tl.range(first, first + K // SPLITS, BLOCK_K, num_stages=STAGES):
        w = tl.load(w_ptrs + k0)
        x = tl.load(x_ptrs + k0)
        acc = tl.dot(w, tl.trans(x), acc, input_precision="ieee")
        if GATED:
            u = tl.load(w_ptrs + to_up + k0)
            acc_up = tl.dot(u, tl.trans(x), acc_up, input_precision="ieee")
        if DIVIDED:
            xf = x.to(tl.float32)
            square += xf * xf
    if DIVIDED:
        factor = tl.rsqrt(tl.sum(square, 1) / K + eps)[None, :]
        acc *= factor
        acc_up *= factor
    if GATED:
        acc = activated(acc, acc_up, GELU)

    to = m[None, :] * N + n[:, None]
    inside = (m < M)[None, :] & (n < N)[:, None]
    if SPLITS == 1:
        _store(acc, residual_ptr, out_ptr, to, inside, HAS_RESIDUAL)
    else:
        in_tile = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + m[None, :]
        parts = parts_ptr + tile * (SPLITS * BLOCK_N * BLOCK_M) + in_tile
        tl.store(parts + split * (BLOCK_N * BLOCK_M), acc)
        # All threads must have stored before one of them counts the arrival.
        tl.debug_barrier()
        before = tl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel", scope="gpu")
        if before == SPLITS - 1:
            tl.store(arrived_ptr + tile, 0)
            total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            for part in tl.static_range(SPLITS):
                # Loaded from L2, since this multiprocessor's L1 may hold stale lines of the parts.
                total += tl.load(parts + part * (BLOCK_N * BLOCK_M), cache_modifier=".cg")
            _store(total, residual_ptr, out_ptr, to, inside, HAS_RESIDUAL)


@triton.jit
def _store(
    y: tl.tensor,
    residual_ptr: tl.tensor,
    out_ptr: tl.tensor,
    to: tl.tensor,
    inside: tl.tensor,
    HAS_RESIDUAL: tl.constexpr,
) -> None:
    if HAS_RESIDUAL:
        y += tl.load(residual_ptr + to, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + to, y.to(out_ptr.dtype.element_ty), mask=inside)
