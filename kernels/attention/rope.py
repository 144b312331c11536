# mypy: disable-error-code="untyped-decorator"
"""All that happens between the qkv projection and attention, in one pass over its output.

    qkv [T, (H + 2 Hkv) D], positions [T], cos_sin [P, R], slot_mapping [T]
      ->  q [T, H, D], and k_cache, v_cache [num_blocks, block_size, Hkv, D] in place

Each head of q and k is normed where the model has q/k norms, then its first R dimensions are
rotated (halves, not pairs). Keys and values go straight to their cache slots; a negative slot is
padding and is not written. With rms_of [T, N], each row of qkv counts divided by the root mean
square of that row: what is left of a norm whose weight is in the product's. Caches in FP8 come with
their scales, and hold the FP8 of what caches of the type of qkv would, of keys less their offsets
[Hkv, D].
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels import fp8
from kernels.attention.paged import check_types
from kernels.norm.rms_norm import FACTOR_STEP, rms_factor
from kernels.pdl import has_pdl, launch_options
from kernels.quantized.float8_bytes import fp8_bytes

_FEW_TOKENS = 64


def norm_rope_write_kv(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    rms_of: torch.Tensor | None = None,
    kv_scales: torch.Tensor | None = None,
    key_offsets: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the rotated queries and fill the caches; `qkv` is left as it was.

    Row p of `cos_sin` is the R/2 cosines of position p, then its sines. `q_weight` and `k_weight`
    are the q/k norms, both or neither: [D] those of each head, [H D] and [Hkv D] one of all heads'
    queries and one of all keys.
    """
    num_tokens, width = qkv.shape
    _, block_size, num_kv_heads, head_dim = k_cache.shape
    num_heads = width // head_dim - 2 * num_kv_heads
    if num_heads <= 0 or width % head_dim or head_dim & (head_dim - 1):
        raise ValueError(f"rows of {width} do not hold heads of {head_dim} and {num_kv_heads=}")
    if qkv.stride(1) != 1 or k_cache.stride(3) != 1:
        raise ValueError("rows of qkv and vectors of the cache must be contiguous")
    if k_cache.shape != v_cache.shape or k_cache.stride() != v_cache.stride():
        raise ValueError("k_cache and v_cache differ in shape or strides")
    check_types(qkv.dtype, k_cache, v_cache, kv_scales)
    fp8.check_offsets(key_offsets, k_cache.dtype, num_kv_heads, head_dim)
    rotated = cos_sin.shape[1]
    if not 0 < rotated <= head_dim or rotated % 2 or not cos_sin.is_contiguous():
        raise ValueError(
            f"cos_sin must be contiguous [P, R], an even R up to {head_dim}, got "
            f"{tuple(cos_sin.shape)}"
        )
    if positions.shape != (num_tokens,) or slot_mapping.shape != (num_tokens,):
        raise ValueError(f"{num_tokens} tokens: {positions.shape=}, {slot_mapping.shape=}")
    if not positions.dtype == slot_mapping.dtype == torch.int64:
        raise TypeError("positions and slot_mapping must be int64")
    if (q_weight is None) != (k_weight is None):
        raise ValueError("q_weight and k_weight come together")
    norms_all = q_weight is not None and len(q_weight) > head_dim
    for weight, heads in ((q_weight, num_heads), (k_weight, num_kv_heads)):
        if weight is None:
            continue
        size = heads * head_dim if norms_all else head_dim
        if weight.shape != (size,) or weight.dtype not in (qkv.dtype, torch.float32):
            raise ValueError(f"norm weights must be [{size}] of {qkv.dtype} or float32")

    if rms_of is not None and (len(rms_of) != num_tokens or not rms_of.is_contiguous()):
        raise ValueError(f"rms_of must be contiguous [{num_tokens}, N], got {tuple(rms_of.shape)}")

    q = qkv.new_empty((num_tokens, num_heads, head_dim))
    if num_tokens == 0:
        return q
    # A few tokens need many small programs to fill the chip, many tokens want larger ones.
    heads = 2 if num_tokens <= _FEW_TOKENS else min(8, triton.next_power_of_2(num_kv_heads))
    tiles = triton.cdiv(num_heads, heads) + 2 * triton.cdiv(num_kv_heads, heads)
    if kv_scales is not None:  # FP8 is written as bytes, on every device
        mantissa = fp8.MANTISSA_BITS[k_cache.dtype]
        k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
    else:
        mantissa = 0
    _norm_rope_write_kv_kernel[(tiles, num_tokens)](
        qkv, rms_of, positions, cos_sin, slot_mapping, q_weight, k_weight, q, k_cache, v_cache,
        kv_scales, key_offsets, eps,
        qkv.stride(0), *k_cache.stride()[:3],
        N=0 if rms_of is None else rms_of.shape[1],
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        D=head_dim,
        ROTATED=rotated,
        BLOCK_SIZE=block_size,
        HEADS=heads,
        STEP=FACTOR_STEP,
        NORM=q_weight is not None,
        NORMS_ALL=norms_all,
        OFFSETS=key_offsets is not None,
        MANTISSA=mantissa,
        PDL=has_pdl(qkv),
        num_warps=max(1, heads // 4),
        **launch_options(qkv),
    )  # fmt: skip
    return q


@triton.jit
def _mean_square(row_ptr: tl.tensor, size: tl.tensor, STEP: tl.constexpr) -> tl.tensor:
    """The mean square of a contiguous row [size]."""
    square = tl.zeros([STEP], tl.float32)
    for first in range(0, size, STEP):
        i = first + tl.arange(0, STEP)
        x = tl.load(row_ptr + i, mask=i < size, other=0.0).to(tl.float32)
        square += x * x
    return tl.sum(square, 0) / size


@triton.jit
def _norm_rope_write_kv_kernel(
    qkv_ptr: tl.tensor,
    rms_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    cos_sin_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    q_weight_ptr: tl.tensor,
    k_weight_ptr: tl.tensor,
    q_ptr: tl.tensor,
    k_cache_ptr: tl.tensor,
    v_cache_ptr: tl.tensor,
    kv_scales_ptr: tl.tensor,
    offsets_ptr: tl.tensor,
    eps: tl.tensor,
    stride_qkv: tl.tensor,
    stride_block: tl.tensor,
    stride_token: tl.tensor,
    stride_head: tl.tensor,
    N: tl.constexpr,  # 0: rows are as they are
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    ROTATED: tl.constexpr,  # the first dimensions of a head, up to D
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    STEP: tl.constexpr,
    NORM: tl.constexpr,
    NORMS_ALL: tl.constexpr,  # the norm is one of all heads
    OFFSETS: tl.constexpr,  # of keys
    MANTISSA: tl.constexpr,  # bits of FP8 numbers; 0: the caches are of the type of qkv
    PDL: tl.constexpr,
) -> None:
    Q_TILES: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    KV_TILES: tl.constexpr = (NUM_KV_HEADS + HEADS - 1) // HEADS
    HALF: tl.constexpr = D // 2
    tile = tl.program_id(0)
    token = tl.program_id(1).to(tl.int64)
    is_q = tile < Q_TILES
    is_v = tile >= Q_TILES + KV_TILES
    half = tl.arange(0, HALF)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()

    # Which heads these are, and where their section of the row starts.
    section = tl.where(is_q, 0, tl.where(is_v, NUM_HEADS + NUM_KV_HEADS, NUM_HEADS))
    first = tl.where(is_q, tile, tl.where(is_v, tile - Q_TILES - KV_TILES, tile - Q_TILES)) * HEADS
    heads = first + tl.arange(0, HEADS)
    inside = (heads < tl.where(is_q, NUM_HEADS, NUM_KV_HEADS))[:, None]
    # Dimensions that turn with those `apart` from them, and the rest in such pairs, too.
    if ROTATED == D:
        dims = half
        apart: tl.constexpr = HALF
        apart_row: tl.constexpr = HALF
    else:
        turns = half < ROTATED // 2
        dims = tl.where(turns, half, half + ROTATED // 2)
        apart = tl.where(turns, ROTATED // 2, (D - ROTATED) // 2)
        apart_row = apart[None, :]
    low = qkv_ptr + token * stride_qkv + ((section + heads) * D)[:, None] + dims[None, :]
    x1 = tl.load(low, mask=inside, other=0.0)  # [HEADS, D/2]
    x2 = tl.load(low + apart_row, mask=inside, other=0.0)
    slot = tl.load(slots_ptr + token)
    dtype = x1.dtype
    f1 = x1.to(tl.float32)
    f2 = x2.to(tl.float32)
    if N > 0:
        factor = rms_factor(rms_ptr + token * N, eps, N, STEP)
        f1 *= factor
        f2 *= factor

    if not is_v:
        position = tl.load(positions_ptr + token)
        if ROTATED == D:
            cos = tl.load(cos_sin_ptr + position * D + half).to(tl.float32)[None, :]
            sin = tl.load(cos_sin_ptr + position * D + HALF + half).to(tl.float32)[None, :]
        else:
            row = cos_sin_ptr + position * ROTATED + half
            cos = tl.load(row, mask=turns, other=1.0).to(tl.float32)[None, :]
            sin = tl.load(row + ROTATED // 2, mask=turns, other=0.0).to(tl.float32)[None, :]
        if NORMS_ALL:
            weight_ptr = q_weight_ptr if is_q else k_weight_ptr
            num_heads = tl.where(is_q, NUM_HEADS, NUM_KV_HEADS)
            row = qkv_ptr + token * stride_qkv + section * D
            square = _mean_square(row, num_heads * D, STEP)
            if N > 0:
                square *= factor * factor
            all_factor = tl.rsqrt(square + eps)
            weights = weight_ptr + (heads * D)[:, None] + dims[None, :]
            w1 = tl.load(weights, mask=inside, other=0.0)
            w2 = tl.load(weights + apart_row, mask=inside, other=0.0)
            f1 = ((f1 * all_factor).to(w1.dtype) * w1).to(tl.float32)
            f2 = ((f2 * all_factor).to(w2.dtype) * w2).to(tl.float32)
        elif NORM:
            weight_ptr = q_weight_ptr if is_q else k_weight_ptr
            square = tl.sum(f1 * f1, 1) + tl.sum(f2 * f2, 1)
            head_factor = tl.rsqrt(square / D + eps)[:, None]
            w1 = tl.load(weight_ptr + dims)[None, :]
            w2 = tl.load(weight_ptr + apart + dims)[None, :]
            f1 = ((f1 * head_factor).to(w1.dtype) * w1).to(tl.float32)
            f2 = ((f2 * head_factor).to(w2.dtype) * w2).to(tl.float32)
        f1, f2 = f1 * cos - f2 * sin, f2 * cos + f1 * sin
    x1 = f1.to(dtype)
    x2 = f2.to(dtype)

    if is_q:
        to = q_ptr + token * NUM_HEADS * D + (heads * D)[:, None] + dims[None, :]
        tl.store(to, x1, mask=inside)
        tl.store(to + apart_row, x2, mask=inside)
    elif slot >= 0:
        cache_ptr = v_cache_ptr if is_v else k_cache_ptr
        to = cache_ptr + slot // BLOCK_SIZE * stride_block + slot % BLOCK_SIZE * stride_token
        to = to + (heads * stride_head)[:, None] + dims[None, :]
        if MANTISSA > 0:
            inverses = kv_scales_ptr + tl.where(is_v, 3, 2) * NUM_KV_HEADS + heads
            inverse = tl.load(inverses, mask=heads < NUM_KV_HEADS, other=1.0)[:, None]
            stored1 = x1.to(tl.float32)
            stored2 = x2.to(tl.float32)
            if OFFSETS:
                offsets = offsets_ptr + (heads * D)[:, None] + dims[None, :]
                is_k = inside & (not is_v)
                stored1 -= tl.load(offsets, mask=is_k, other=0.0)
                stored2 -= tl.load(offsets + apart_row, mask=is_k, other=0.0)
            tl.store(to, fp8_bytes(stored1, inverse, MANTISSA), mask=inside)
            tl.store(to + apart_row, fp8_bytes(stored2, inverse, MANTISSA), mask=inside)
        else:
            tl.store(to, x1, mask=inside)
            tl.store(to + apart_row, x2, mask=inside)
