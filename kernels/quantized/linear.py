# mypy: disable-error-code="untyped-decorator"
"""Linear layer with a weight in 4 or 8 bits, for up to 32 rows; and the weight in the rows' type.

    x [M, K] with M <= 32, weight [N, K] in `NarrowWeight`  ->  y = x @ weight.T  [M, N]
    with bias [N], residual [M, N]:  both added

The time is that of reading the weight once. It is widened in registers to the type of `x`, as
`dequantized` does for more rows; one scale for each output is applied to the sum instead.
"""

import torch
import triton
import triton.language as tl

from kernels.quantized.narrow import NarrowWeight

MAX_ROWS = 32
SLICES = 4  # of the inputs, for the warps of a program
BLOCK_N = 16
ONE_GROUP_COLUMNS = 128  # of a tile where one group has all columns
BLOCK_ROWS, BLOCK_COLUMNS = 8, 256  # of a tile that is made wide


def linear(
    x: torch.Tensor,
    weight: NarrowWeight,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """The product; sums are float32, rounded once at the end. Raises ValueError."""
    (m, k), (n, num_inputs) = x.shape, weight.shape
    if not 1 <= m <= MAX_ROWS or k != num_inputs:
        raise ValueError(f"x must be [1..{MAX_ROWS}, {num_inputs}], it is {list(x.shape)}")
    if weight.is_by_lanes:
        raise ValueError("weight: its integers are in the order of lanes")
    if x.stride(1) != 1 or not weight.data.is_contiguous():
        raise ValueError("rows of x and of the weight must be contiguous")
    if bias is not None and bias.shape != (n,):
        raise ValueError(f"bias must be [{n}]")
    if residual is not None and (residual.shape != (m, n) or not residual.is_contiguous()):
        raise ValueError(f"residual must be contiguous [{m}, {n}]")
    out = x.new_empty((m, n))
    has_one = weight.scales.shape[1] == 1
    block_k = min(ONE_GROUP_COLUMNS, triton.next_power_of_2(k)) if has_one else weight.group
    _linear_kernel[(triton.cdiv(n, BLOCK_N),)](
        x, weight.data, weight.scales, weight.offsets, bias, residual, out, m, x.stride(0),
        N=n, K=k, GROUPS=weight.scales.shape[1], BITS=weight.bits,
        IS_FLOAT=weight.is_float, HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None, BLOCK_M=max(8, triton.next_power_of_2(m)),
        BLOCK_N=BLOCK_N, BLOCK_K=block_k, SLICES=SLICES, num_warps=SLICES,
    )  # fmt: skip
    return out


def dequantized(weight: NarrowWeight, dtype: torch.dtype) -> torch.Tensor:
    """The weight [N, K]: computed in float32, then rounded once."""
    n, k = weight.shape
    out = torch.empty((n, k), dtype=dtype, device=weight.data.device)
    grid = (triton.cdiv(n, BLOCK_ROWS), triton.cdiv(k, BLOCK_COLUMNS))
    _dequantize_kernel[grid](
        weight.data, weight.scales, weight.offsets, out,
        N=n, K=k, GROUP=weight.group, GROUPS=weight.scales.shape[1], BITS=weight.bits,
        IS_FLOAT=weight.is_float, IS_BY_LANES=weight.is_by_lanes, IS_PAIRED=weight.is_paired,
        ROWS=BLOCK_ROWS, BLOCK=BLOCK_COLUMNS,
    )  # fmt: skip
    return out


@triton.jit
def _widened(byte: tl.tensor, IS_FLOAT: tl.constexpr) -> tl.tensor:
    """float32 of integers, or of the bits of e4m3: those of float16 with another exponent."""
    if IS_FLOAT:
        wide = byte.to(tl.uint16)
        half = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
        return half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return byte.to(tl.float32)


@triton.jit(do_not_specialize=["M"])  # one kernel for all numbers of rows
def _linear_kernel(
    x_ptr: tl.tensor,
    data_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    offset_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    out_ptr: tl.tensor,
    M: tl.tensor,
    stride_x: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUPS: tl.constexpr,
    BITS: tl.constexpr,
    IS_FLOAT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SLICES: tl.constexpr,
) -> None:
    """A batched GEMM over slices of K, so that each warp has its own; a slice is one group."""
    HALVES: tl.constexpr = 8 // BITS  # columns in a byte
    BYTES: tl.constexpr = BLOCK_K // HALVES
    ROW: tl.constexpr = K // HALVES
    SCALES_SUM: tl.constexpr = IS_FLOAT and GROUPS == 1
    m = tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    s = tl.arange(0, SLICES)
    j = s[:, None] * BYTES + tl.arange(0, BYTES)[None, :]  # [SLICES, BYTES]
    column = s[:, None] * BLOCK_K + tl.arange(0, BYTES)[None, :]
    is_m = (m < M)[None, None, :]
    is_n = n < N
    data_ptrs = data_ptr + n.to(tl.int64)[None, :, None] * ROW + j[:, None, :]
    x_ptrs = x_ptr + m[None, None, :] * stride_x + column[:, :, None]
    STEP: tl.constexpr = SLICES if GROUPS > 1 else 0  # groups
    group = s if GROUPS > 1 else s * 0
    group_ptrs = n.to(tl.int64)[None, :] * GROUPS + group[:, None]  # [SLICES, BLOCK_N]
    acc = tl.zeros([SLICES, BLOCK_N, BLOCK_M], tl.float32)
    for step in range(tl.cdiv(K, SLICES * BLOCK_K)):
        k0 = step * SLICES * BLOCK_K
        is_k = k0 + column < K
        inside = is_n[None, :, None] & is_k[:, None, :]
        byte = tl.load(data_ptrs + k0 // HALVES, mask=inside, other=0)  # [SLICES, BLOCK_N, BYTES]
        x = tl.load(x_ptrs + k0, mask=is_m & is_k[:, :, None], other=0.0)
        low = _widened(byte & 0xF if BITS == 4 else byte, IS_FLOAT)
        if not SCALES_SUM:
            at = group_ptrs + step * STEP
            is_group = is_n[None, :] & (group + step * STEP < GROUPS)[:, None]
            scale = tl.load(scale_ptr + at, mask=is_group, other=0.0)[:, :, None]
            low *= scale
            if not IS_FLOAT:
                offset = tl.load(offset_ptr + at, mask=is_group, other=0.0)[:, :, None]
                low += offset
        acc = tl.dot(low.to(x.dtype), x, acc, input_precision="ieee")
        if BITS == 4:
            high = _widened(byte >> 4, IS_FLOAT) * scale + offset
            x = tl.load(x_ptrs + k0 + BYTES, mask=is_m & is_k[:, :, None], other=0.0)
            acc = tl.dot(high.to(x.dtype), x, acc, input_precision="ieee")
    y = tl.sum(acc, 0)  # [BLOCK_N, BLOCK_M]
    if SCALES_SUM:
        y *= tl.load(scale_ptr + n, mask=is_n, other=0.0)[:, None]
    to = m[None, :] * N + n[:, None]
    inside = (m < M)[None, :] & is_n[:, None]
    if HAS_BIAS:
        y += tl.load(bias_ptr + n, mask=is_n, other=0.0).to(tl.float32)[:, None]
    if HAS_RESIDUAL:
        y += tl.load(residual_ptr + to, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + to, y.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _dequantize_kernel(
    data_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    offset_ptr: tl.tensor,
    out_ptr: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    BITS: tl.constexpr,
    IS_FLOAT: tl.constexpr,
    IS_BY_LANES: tl.constexpr,
    IS_PAIRED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """A tile."""
    n = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    k = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    inside = (n < N) & (k < K)
    group = k // GROUP
    if IS_BY_LANES:
        IN_WORD: tl.constexpr = 32 // BITS
        quarter, lane, at = k // (4 * IN_WORD) % 4, k // IN_WORD % 4, k % IN_WORD
        first = k // (16 * IN_WORD) * 64 + lane * 16 + quarter * 4
        in_word = at // (IN_WORD // 2) + at % 2 * 2
        is_high = at // 2 % 2 == 1
        byte = tl.load(data_ptr + n * (K * BITS // 8) + first + in_word, mask=inside, other=0)
    elif BITS == 4:
        HALF: tl.constexpr = GROUP // 2
        at = k % GROUP
        is_high = at >= HALF
        byte = tl.load(data_ptr + n * (K // 2) + group * HALF + at % HALF, mask=inside, other=0)
    else:
        byte = tl.load(data_ptr + n * K + k, mask=inside, other=0)
    if BITS == 4:
        byte = tl.where(is_high, byte >> 4, byte & 0xF)
    value = _widened(byte, IS_FLOAT)
    if IS_PAIRED:
        pair_ptr = scale_ptr + (n * GROUPS + group) * 2
        scale = tl.load(pair_ptr, mask=inside, other=0.0).to(tl.float32)
        zero = tl.load(pair_ptr + 1, mask=inside, other=0.0).to(tl.float32)
        value = value * scale - zero * scale
    else:
        value *= tl.load(scale_ptr + n * GROUPS + group, mask=inside, other=0.0)
        if not IS_FLOAT:
            value += tl.load(offset_ptr + n * GROUPS + group, mask=inside, other=0.0)
    tl.store(out_ptr + n * K + k, value.to(out_ptr.dtype.element_ty), mask=inside)
