# mypy: disable-error-code="untyped-decorator"
"""Products of rows with the weights of their experts, and the weighted sums of these.

    x [T, K], weight [E, N, K]              ->  [T * per_row, N], a row for each pair
    with gated, weight [E, 2N, K]:              silu(gate) * up
    y [T * per_row, N], residual [T, N] or None  ->  [T, N]

Weights in 8 bits are widened in registers; a sum is multiplied by its scale, group by group.

A program multiplies a tile of one expert's rows with some rows of its weight. The grid has room
for every routing of the number of rows; which tile a program has it finds by the experts' counts,
so that no host knows them. Programs beyond the last tile end at once. Neighbouring programs read
one expert's weights: they come from memory once.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.expert_clamp import Clamp
from kernels.experts.activation import gate_and_mul
from kernels.experts.mxfp4 import numbers
from kernels.experts.router import Routing
from kernels.experts.weights import ExpertWeights
from kernels.pdl import has_pdl, is_compiled, launch_options
from kernels.quantized.float8_bytes import widened_pairs

_COMBINED = 1024  # columns of a program that adds
_SHARED_BYTES = 200 << 10  # of the pipelines that are quickest where there is room for them


@dataclass(frozen=True, slots=True)
class _Config:
    block_m: int  # rows of an expert
    block_n: int
    block_k: int
    num_stages: int
    num_warps: int


@lru_cache
def _device_has_room(index: int) -> bool:
    properties = triton.runtime.driver.active.utils.get_device_properties(index)
    return int(properties["max_shared_mem"]) >= _SHARED_BYTES


def _has_room(x: torch.Tensor) -> bool:
    """True if the device has shared memory for long pipelines, as data center GPUs do."""
    return not x.is_cuda or _device_has_room(x.get_device())


def _config(
    num_rows: int,
    rows_per_expert: float,
    gated: bool,
    itemsize: int,
    *,
    is_narrow: bool,
    is_mxfp4: bool,
    has_room: bool,
) -> _Config:
    """The launch configuration, measured with the experts of Qwen3-30B-A3B and gpt-oss-20b.

    A kernel is compiled for each, so there are few. Rehearsals meet them all, since they have
    steps of 2 to 256 rows, of the largest number, and of all sizes of graphs between.
    """
    if itemsize == 4:  # no tensor cores, twice the shared memory
        return _Config(16, 64, 32, 2, 4)
    if not has_room:
        return _Config(64 if num_rows > 256 else 16, 64, 64, 2, 4)
    if is_mxfp4:  # widening is most of the work: tiles of more rows share it
        if rows_per_expert <= 12:
            return _Config(16, 64, 64, 4, 4)
        if num_rows > 1024:
            return _Config(128, 128, 64, 3, 8)
        return _Config(64 if gated else 32, 128, 64, 3, 8)
    if is_narrow and num_rows <= 256:
        return _Config(16 if rows_per_expert <= 12 else 32, 64, 128, 3, 4)
    if num_rows > 1024:
        return _Config(128, 128, 64, 4 if gated else 3, 8)
    if num_rows > 256:
        return _Config(64, 128, 64, 4 if gated else 3, 8)
    if rows_per_expert > 4:
        return _Config(32, 64, 128, 4 if gated else 3, 4)
    return _Config(16, 64, 128, 4 if gated else 3, 4)


def grouped_linear(
    x: torch.Tensor,
    weight: ExpertWeights,
    routing: Routing,
    *,
    gated: bool = False,
    clamp: Clamp | None = None,
) -> torch.Tensor:
    """The product of each pair, [T * per_row, N]; x has a row for each row of the step, or pair.

    With `gated` the result is silu(gate) * up, or the activation of `clamp`.
    """
    weight.check(x)
    num_experts, width, k = weight.shape
    n, num_rows, num_pairs = width // (1 + gated), len(routing.experts), routing.num_pairs
    if len(x) not in (num_rows, num_pairs):
        raise ValueError(f"{len(x)} rows of x for {num_rows} rows and {num_pairs} pairs")
    config = _config(
        num_rows,
        num_pairs / num_experts,
        gated,
        x.element_size(),
        is_narrow=weight.scales is not None,
        is_mxfp4=weight.is_mxfp4,
        has_room=_has_room(x),
    )
    out = x.new_empty((num_pairs, n))
    # Each expert with rows may have one tile that is not full.
    most_tiles = min(num_experts, num_pairs) + num_pairs // config.block_m
    block_k = weight.block_k(config.block_k)
    # Two numbers of 8 bits at once, where kernels widen them so.
    are_pairs = weight.is_fp8 and is_compiled(x) and x.dtype == torch.bfloat16
    values = weight.values.view(torch.int16) if weight.is_mxfp4 or are_pairs else weight.values
    _grouped_linear_kernel[(most_tiles * triton.cdiv(n, config.block_n),)](
        x, values, weight.scales, weight.bias, routing.counts, routing.pairs, out, num_rows,
        x.stride(0),
        E=num_experts,
        N=n,
        K=k,
        GROUPS=weight.num_groups,
        STEPS_OF_A_GROUP=(weight.group or block_k) // block_k,
        ROWS_OF_A_TOKEN=1 if len(x) == num_pairs else routing.per_row,
        BLOCK_E=triton.next_power_of_2(num_experts),
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=block_k,
        STAGES=config.num_stages,
        GATED=gated,
        IS_FP8=weight.is_fp8,
        IS_FP4=weight.is_mxfp4,
        IS_PAIRS=are_pairs,
        IS_COMPILED=is_compiled(x),
        HAS_BIAS=weight.bias is not None,
        LIMIT=0.0 if clamp is None else clamp.limit,
        ALPHA=1.0 if clamp is None else clamp.alpha,
        PDL=has_pdl(x),
        num_warps=config.num_warps,
        **launch_options(x),
    )  # fmt: skip
    return out


def combined(y: torch.Tensor, routing: Routing, residual: torch.Tensor | None) -> torch.Tensor:
    """The weighted sum over each row's pairs y [T * per_row, N], plus the residual: [T, N]."""
    num_rows, width = len(routing.experts), y.shape[1]
    out = y.new_empty((num_rows, width))
    _combined_kernel[(num_rows, triton.cdiv(width, _COMBINED))](
        y, routing.weights, residual, out,
        N=width,
        PER_ROW=routing.per_row,
        BLOCK_N=_COMBINED,
        HAS_RESIDUAL=residual is not None,
        PDL=has_pdl(y),
        num_warps=4,
        **launch_options(y),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["T"])  # one kernel for all numbers of rows
def _grouped_linear_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    scales_ptr: tl.tensor,  # [E, N or 2N, GROUPS] where IS_FP8
    bias_ptr: tl.tensor,  # [E, N or 2N] where HAS_BIAS
    counts_ptr: tl.tensor,
    pairs_ptr: tl.tensor,
    out_ptr: tl.tensor,
    T: tl.tensor,
    stride_x: tl.tensor,
    E: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUPS: tl.constexpr,
    STEPS_OF_A_GROUP: tl.constexpr,  # tiles of columns that share scales, if there are groups
    ROWS_OF_A_TOKEN: tl.constexpr,  # pairs that share a row of x
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    GATED: tl.constexpr,
    IS_FP8: tl.constexpr,
    IS_FP4: tl.constexpr,
    IS_PAIRS: tl.constexpr,
    IS_COMPILED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    LIMIT: tl.constexpr,  # 0: the activation is SiLU
    ALPHA: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    TILES_N: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    tile = tl.program_id(0) // TILES_N
    e = tl.arange(0, BLOCK_E)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    counts = tl.load(counts_ptr + e, mask=e < E, other=0)
    tiles = (counts + BLOCK_M - 1) // BLOCK_M
    ends = tl.cumsum(tiles, 0)
    if tile < tl.sum(tiles, 0):
        expert = tl.sum((ends <= tile).to(tl.int32), 0)
        is_it = e == expert
        count = tl.sum(tl.where(is_it, counts, 0), 0)
        first = (tile - tl.sum(tl.where(is_it, ends - tiles, 0), 0)) * BLOCK_M
        m = first + tl.arange(0, BLOCK_M)
        n = tl.program_id(0) % TILES_N * BLOCK_N + tl.arange(0, BLOCK_N)
        k = tl.arange(0, BLOCK_K)
        # Rows and columns beyond the last repeat it and are not stored.
        pair = tl.load(pairs_ptr + expert * T + tl.minimum(m, count - 1)).to(tl.int64)
        columns = tl.minimum(n, N - 1)
        x_ptrs = x_ptr + (pair // ROWS_OF_A_TOKEN)[:, None] * stride_x + k[None, :]
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        acc_up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        if IS_FP4:
            g, j = tl.arange(0, BLOCK_K // 32), tl.arange(0, 8)  # two bytes at once
            column = tl.arange(0, BLOCK_K // 2)
            column = column // 16 * 32 + column % 16  # of the lower halves of bytes
            rows = expert.to(tl.int64) * ((1 + GATED) * N) + columns[:, None]
            groups = rows * (K // 32) + g[None, :]
            w_ptr = weight_ptr + groups[:, :, None] * 8 + j[None, None, :]
            s_ptr = scales_ptr + groups
            x_row = x_ptr + (pair // ROWS_OF_A_TOKEN)[:, None] * stride_x + column[None, :]
            # Exponents are too few to be copied ahead, so they are read a tile ahead here.
            s = tl.load(s_ptr, mask=(g < K // 32)[None, :], other=0)
            t = s
            if GATED:
                t = tl.load(s_ptr + N * (K // 32), mask=(g < K // 32)[None, :], other=0)
            for k0 in tl.range(0, K, BLOCK_K, num_stages=STAGES):
                is_group = (k0 // 32 + g < K // 32)[None, :]
                is_next = (k0 // 32 + BLOCK_K // 32 + g < K // 32)[None, :]
                is_k = (k0 + column < K)[None, :]
                low = tl.load(x_row + k0, mask=is_k, other=0.0)
                high = tl.load(x_row + k0 + 16, mask=is_k, other=0.0)
                w = tl.load(w_ptr + k0 // 4, mask=is_group[:, :, None], other=0)
                w_low, w_high = numbers(w, s, low.dtype, IS_COMPILED)
                s = tl.load(s_ptr + k0 // 32 + BLOCK_K // 32, mask=is_next, other=0)
                acc = tl.dot(w_low, tl.trans(low), acc, input_precision="ieee")
                acc = tl.dot(w_high, tl.trans(high), acc, input_precision="ieee")
                if GATED:
                    u = tl.load(w_ptr + N * (K // 4) + k0 // 4, mask=is_group[:, :, None], other=0)
                    u_low, u_high = numbers(u, t, low.dtype, IS_COMPILED)
                    t = tl.load(
                        s_ptr + N * (K // 32) + k0 // 32 + BLOCK_K // 32, mask=is_next, other=0
                    )
                    acc_up = tl.dot(u_low, tl.trans(low), acc_up, input_precision="ieee")
                    acc_up = tl.dot(u_high, tl.trans(high), acc_up, input_precision="ieee")
        else:
            # Pairs are two numbers of 8 bits.
            OF_ONE: tl.constexpr = 2 if IS_PAIRS else 1
            columns_k = tl.arange(0, BLOCK_K // OF_ONE)
            of_expert = weight_ptr + expert.to(tl.int64) * ((1 + GATED) * N * K // OF_ONE)
            w_ptrs = of_expert + columns[:, None] * (K // OF_ONE) + columns_k[None, :]
            up_ptrs = w_ptrs + N * K // OF_ONE
            if IS_FP8:
                s_ptrs = scales_ptr + (expert * ((1 + GATED) * N) + columns) * GROUPS
            for k0 in tl.range(0, K, BLOCK_K, num_stages=STAGES):
                inside_w, inside_x = None, None
                if K % BLOCK_K != 0:
                    inside_w = (k0 + columns_k * OF_ONE < K)[None, :]
                    inside_x = (k0 + k < K)[None, :]
                w = _loaded(w_ptrs + k0 // OF_ONE, inside_w, IS_PAIRS).to(x_ptr.dtype.element_ty)
                x = _loaded(x_ptrs + k0, inside_x, False)
                if GROUPS == 1:
                    acc = tl.dot(w, tl.trans(x), acc, input_precision="ieee")
                else:
                    group = k0 // BLOCK_K // STEPS_OF_A_GROUP
                    part = tl.dot(w, tl.trans(x), input_precision="ieee")
                    acc += part * tl.load(s_ptrs + group)[:, None]
                if GATED:
                    u = _loaded(up_ptrs + k0 // OF_ONE, inside_w, IS_PAIRS).to(x.dtype)
                    if GROUPS == 1:
                        acc_up = tl.dot(u, tl.trans(x), acc_up, input_precision="ieee")
                    else:
                        part = tl.dot(u, tl.trans(x), input_precision="ieee")
                        acc_up += part * tl.load(s_ptrs + N * GROUPS + group)[:, None]
        if IS_FP8 and GROUPS == 1:
            acc *= tl.load(s_ptrs)[:, None]
            if GATED:
                acc_up *= tl.load(s_ptrs + N)[:, None]
        if HAS_BIAS:
            b_ptrs = bias_ptr + expert * ((1 + GATED) * N) + columns
            acc += tl.load(b_ptrs).to(tl.float32)[:, None]
            if GATED:
                acc_up += tl.load(b_ptrs + N).to(tl.float32)[:, None]
        if GATED:
            acc = gate_and_mul(acc, acc_up, LIMIT, ALPHA)
        inside = (n < N)[:, None] & (m < count)[None, :]
        to = pair[None, :] * N + n[:, None]
        tl.store(out_ptr + to, acc.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _loaded(ptrs: tl.tensor, inside: tl.tensor, IS_PAIRS: tl.constexpr) -> tl.tensor:
    """Numbers; of pairs [N, K / 2] both, [N, K]. `inside` None: all are."""
    other: tl.constexpr = 0 if IS_PAIRS else 0.0
    found = tl.load(ptrs) if inside is None else tl.load(ptrs, mask=inside, other=other)
    return widened_pairs(found) if IS_PAIRS else found


@triton.jit
def _combined_kernel(
    y_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    out_ptr: tl.tensor,
    N: tl.constexpr,
    PER_ROW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_n = n < N
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    to = row.to(tl.int64) * N + n
    total = tl.zeros([BLOCK_N], tl.float32)
    if HAS_RESIDUAL:
        total += tl.load(residual_ptr + to, mask=is_n, other=0.0).to(tl.float32)
    for place in tl.static_range(PER_ROW):
        pair = row * PER_ROW + place
        y = tl.load(y_ptr + pair.to(tl.int64) * N + n, mask=is_n, other=0.0)
        total += y.to(tl.float32) * tl.load(weights_ptr + pair)
    tl.store(out_ptr + to, total.to(out_ptr.dtype.element_ty), mask=is_n)
