# mypy: disable-error-code="untyped-decorator"
"""The experts of a few rows: each pair of a row and an expert has programs of its own.

    x [T, h], gate_up [E, 2I, h]                        ->  inner [T * per_row, I]
    inner, down [E, h, I], residual [T, h] or None      ->  [T, h]

Weights go from memory to registers and are used once; sums are float32. Where two rows have one
expert, its weights are read twice, from the cache: with more rows `grouped_linear` is quicker.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.expert_clamp import Clamp
from kernels.experts.activation import gate_and_mul
from kernels.experts.mxfp4 import sums_of_groups
from kernels.experts.router import Routing
from kernels.experts.weights import ExpertWeights
from kernels.pdl import has_pdl, is_compiled, launch_options

# Measured on an H100 with the experts of Qwen3-30B-A3B: a row more is as quick by groups.
_MOST_ROWS, _MOST_ROWS_IN_8_BITS = 3, 6
_GATED_TILE = 4096  # elements of each of the two matrices that a program reads at once
_SUMMED_TILE, _SUMMED_TILE_OF_ONE_ROW = 2048, 256
_MAX_BLOCK_K = 2048
_MXFP4_BLOCK_K = 1024


def pays(num_rows: int, weight: ExpertWeights) -> bool:
    """True if these kernels are quicker than those of groups for so many rows."""
    return num_rows <= (_MOST_ROWS if weight.scales is None else _MOST_ROWS_IN_8_BITS)


def gated(
    x: torch.Tensor, gate_up: ExpertWeights, routing: Routing, clamp: Clamp | None = None
) -> torch.Tensor:
    """silu(gate) * up of each pair, or the activation of `clamp`: [T * per_row, I]."""
    gate_up.check(x)
    _, width, hidden = gate_up.shape
    inner = width // 2
    out = x.new_empty((routing.num_pairs, inner))
    block_k = gate_up.block_k(_block_k(hidden, gate_up.is_mxfp4))
    block_n = max(1, min(32, _GATED_TILE // block_k))
    _gated_kernel[(triton.cdiv(inner, block_n), routing.num_pairs)](
        x, gate_up.values, gate_up.scales, gate_up.bias, routing.experts, out, x.stride(0),
        N=inner,
        K=hidden,
        GROUPS=gate_up.num_groups,
        STEPS_OF_A_GROUP=(gate_up.group or block_k) // block_k,
        PER_ROW=routing.per_row,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        IS_FP8=gate_up.is_fp8,
        IS_FP4=gate_up.is_mxfp4,
        IS_COMPILED=is_compiled(x),
        HAS_BIAS=gate_up.bias is not None,
        LIMIT=0.0 if clamp is None else clamp.limit,
        ALPHA=1.0 if clamp is None else clamp.alpha,
        PDL=has_pdl(x),
        num_warps=4,
        **launch_options(x),
    )  # fmt: skip
    return out


def summed(
    x: torch.Tensor, down: ExpertWeights, routing: Routing, residual: torch.Tensor | None
) -> torch.Tensor:
    """The weighted sum over each row's pairs x [T * per_row, I], plus the residual: [T, h]."""
    down.check(x)
    _, hidden, inner = down.shape
    num_rows = len(routing.experts)
    out = x.new_empty((num_rows, hidden))
    block_k = down.block_k(_block_k(inner, down.is_mxfp4))
    tile = _SUMMED_TILE_OF_ONE_ROW if num_rows == 1 else _SUMMED_TILE
    block_n = 4 if down.is_mxfp4 else max(1, min(16, tile // block_k))
    _summed_kernel[(triton.cdiv(hidden, block_n), num_rows)](
        x, down.values, down.scales, down.bias, routing.experts, routing.weights, residual, out,
        N=hidden,
        K=inner,
        GROUPS=down.num_groups,
        STEPS_OF_A_GROUP=(down.group or block_k) // block_k,
        PER_ROW=routing.per_row,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        HAS_RESIDUAL=residual is not None,
        IS_FP8=down.is_fp8,
        IS_FP4=down.is_mxfp4,
        IS_COMPILED=is_compiled(x),
        HAS_BIAS=down.bias is not None,
        PDL=has_pdl(x),
        num_warps=4,
        **launch_options(x),
    )  # fmt: skip
    return out


def _block_k(k: int, is_mxfp4: bool) -> int:
    """The largest power of two that divides K, so that no lane is idle, if it is large enough."""
    if is_mxfp4:  # a lane has the codes of one group of 32 columns
        k = triton.next_power_of_2(k)
        return min(_MXFP4_BLOCK_K, k)
    divisor = min(k & -k, _MAX_BLOCK_K)
    return divisor if divisor >= 128 else min(_MAX_BLOCK_K, triton.next_power_of_2(k))


@triton.jit
def _gated_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    scales_ptr: tl.tensor,  # [E, N or 2N, GROUPS] where IS_FP8
    bias_ptr: tl.tensor,  # [E, 2N] where HAS_BIAS
    experts_ptr: tl.tensor,
    out_ptr: tl.tensor,
    stride_x: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUPS: tl.constexpr,
    STEPS_OF_A_GROUP: tl.constexpr,  # tiles of columns that share scales, if there are groups
    PER_ROW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_FP8: tl.constexpr,
    IS_FP4: tl.constexpr,
    IS_COMPILED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    LIMIT: tl.constexpr,  # 0: the activation is SiLU
    ALPHA: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    pair = tl.program_id(1)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    is_n = n < N
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    expert = tl.load(experts_ptr + pair).to(tl.int64)
    x_row = x_ptr + (pair // PER_ROW).to(tl.int64) * stride_x
    if IS_FP4:
        g, j = tl.arange(0, BLOCK_K // 32), tl.arange(0, 16)
        acc = tl.zeros([BLOCK_N, BLOCK_K // 32], tl.float32)
        acc_up = tl.zeros([BLOCK_N, BLOCK_K // 32], tl.float32)
        groups = (expert * (2 * N) + n[:, None]) * (K // 32) + g[None, :]
        w_ptr = weight_ptr + groups[:, :, None] * 16 + j[None, None, :]
        x_ptrs = x_row + (g[:, None] * 32 + j[None, :])[None, :, :]
        for k0 in tl.static_range(0, K, BLOCK_K):
            is_group = k0 // 32 + g < K // 32
            inside = is_n[:, None] & is_group[None, :]
            is_x = is_group[None, :, None]
            low = tl.load(x_ptrs + k0, mask=is_x, other=0.0).to(tl.float32)
            high = tl.load(x_ptrs + k0 + 16, mask=is_x, other=0.0).to(tl.float32)
            at = groups + k0 // 32
            acc += sums_of_groups(w_ptr + k0 // 2, scales_ptr + at, low, high, inside, IS_COMPILED)
            acc_up += sums_of_groups(
                w_ptr + N * (K // 2) + k0 // 2, scales_ptr + N * (K // 32) + at,
                low, high, inside, IS_COMPILED,
            )  # fmt: skip
    else:
        gate_ptr = weight_ptr + expert * (2 * N * K) + n[:, None] * K + k[None, :]
        if IS_FP8:
            s_ptr = scales_ptr + (expert * (2 * N) + n) * GROUPS
        acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
        acc_up = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
        for k0 in tl.static_range(0, K, BLOCK_K):
            inside = is_n[:, None] & (k0 + k < K)[None, :]
            w = tl.load(gate_ptr + k0, mask=inside, other=0.0)
            u = tl.load(gate_ptr + N * K + k0, mask=inside, other=0.0)
            x = tl.load(x_row + k0 + k, mask=k0 + k < K, other=0.0).to(tl.float32)
            gate = w.to(tl.float32) * x[None, :]
            up = u.to(tl.float32) * x[None, :]
            if GROUPS > 1:
                group = k0 // BLOCK_K // STEPS_OF_A_GROUP
                gate *= tl.load(s_ptr + group, mask=is_n, other=0.0)[:, None]
                up *= tl.load(s_ptr + N * GROUPS + group, mask=is_n, other=0.0)[:, None]
            acc += gate
            acc_up += up
    gate_sum, up_sum = tl.sum(acc, 1), tl.sum(acc_up, 1)
    if IS_FP8 and GROUPS == 1:
        gate_sum *= tl.load(s_ptr, mask=is_n, other=0.0)
        up_sum *= tl.load(s_ptr + N, mask=is_n, other=0.0)
    if HAS_BIAS:
        b_ptr = bias_ptr + expert * (2 * N) + n
        gate_sum += tl.load(b_ptr, mask=is_n, other=0.0).to(tl.float32)
        up_sum += tl.load(b_ptr + N, mask=is_n, other=0.0).to(tl.float32)
    y = gate_and_mul(gate_sum, up_sum, LIMIT, ALPHA)
    tl.store(out_ptr + pair.to(tl.int64) * N + n, y.to(out_ptr.dtype.element_ty), mask=is_n)


@triton.jit
def _summed_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    scales_ptr: tl.tensor,  # [E, N or 2N, GROUPS] where IS_FP8
    bias_ptr: tl.tensor,  # [E, N] where HAS_BIAS
    experts_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    out_ptr: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUPS: tl.constexpr,
    STEPS_OF_A_GROUP: tl.constexpr,  # tiles of columns that share scales, if there are groups
    PER_ROW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    IS_FP8: tl.constexpr,
    IS_FP4: tl.constexpr,
    IS_COMPILED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    row = tl.program_id(1)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    is_n = n < N
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    acc = tl.zeros([BLOCK_N, BLOCK_K // (32 if IS_FP4 else 1)], tl.float32)
    biases = tl.zeros([BLOCK_N], tl.float32)
    for place in tl.static_range(PER_ROW):
        pair = row * PER_ROW + place
        expert = tl.load(experts_ptr + pair).to(tl.int64)
        share = tl.load(weights_ptr + pair)
        x_row = x_ptr + pair.to(tl.int64) * K
        if IS_FP4:
            g, j = tl.arange(0, BLOCK_K // 32), tl.arange(0, 16)
            groups = (expert * N + n[:, None]) * (K // 32) + g[None, :]
            w_ptr = weight_ptr + groups[:, :, None] * 16 + j[None, None, :]
            x_ptrs = x_row + (g[:, None] * 32 + j[None, :])[None, :, :]
            for k0 in tl.static_range(0, K, BLOCK_K):
                is_group = k0 // 32 + g < K // 32
                is_x = is_group[None, :, None]
                low = tl.load(x_ptrs + k0, mask=is_x, other=0.0).to(tl.float32) * share
                high = tl.load(x_ptrs + k0 + 16, mask=is_x, other=0.0).to(tl.float32) * share
                acc += sums_of_groups(
                    w_ptr + k0 // 2, scales_ptr + groups + k0 // 32,
                    low, high, is_n[:, None] & is_group[None, :], IS_COMPILED,
                )  # fmt: skip
        else:
            w_ptr = weight_ptr + expert * (N * K) + n[:, None] * K + k[None, :]
            if IS_FP8:
                s_ptr = scales_ptr + (expert * N + n) * GROUPS
            for k0 in tl.static_range(0, K, BLOCK_K):
                is_k = k0 + k < K
                w = tl.load(w_ptr + k0, mask=is_n[:, None] & is_k[None, :], other=0.0)
                x = tl.load(x_row + k0 + k, mask=is_k, other=0.0).to(tl.float32) * share
                y = w.to(tl.float32) * x[None, :]
                if IS_FP8:
                    group = k0 // BLOCK_K // STEPS_OF_A_GROUP if GROUPS > 1 else 0
                    y *= tl.load(s_ptr + group, mask=is_n, other=0.0)[:, None]
                acc += y
        if HAS_BIAS:
            bias = tl.load(bias_ptr + expert * N + n, mask=is_n, other=0.0).to(tl.float32)
            biases += bias * share
    total = tl.sum(acc, 1)
    if HAS_BIAS:
        total += biases
    to = row.to(tl.int64) * N + n
    if HAS_RESIDUAL:
        total += tl.load(residual_ptr + to, mask=is_n, other=0.0).to(tl.float32)
    tl.store(out_ptr + to, total.to(out_ptr.dtype.element_ty), mask=is_n)
