# mypy: disable-error-code="untyped-decorator"
"""All that happens between the projections of attention over latents and the attention.

    q [T, H, N + P], kv [T, R + P], positions [T], cos_sin [P', P], slot_mapping [T]
      ->  queries [T, H, R + P], and the cache [num_blocks, block_size, 1, R + P] in place

A row of kv is a latent [R], which is normed, and a key [P] of all heads, which is rotated as the
last P dimensions of each query are; both go to the row of the cache that is the token's slot. A
negative slot is padding and is not written. The first R numbers of each query are left for the
product that absorbs keys. Where pairs are next to each other they are moved apart, which changes
the order of the rotated numbers of queries and keys alike.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.pdl import has_pdl, launch_options

_HEADS = 8  # of a program


def rotate_write_latents(
    q: torch.Tensor,
    kv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    is_interleaved: bool,
) -> torch.Tensor:
    """Returns queries whose last P numbers are filled, and fills the cache.

    Row p of `cos_sin` is the P/2 cosines of position p, then its sines. `norm_weight` [R] is of the
    type of kv, or float32.
    """
    num_tokens, num_heads, width = q.shape
    latent, turned = len(norm_weight), cos_sin.shape[1]
    if kv.shape != (num_tokens, latent + turned) or width <= turned or turned % 2:
        raise ValueError(f"{q.shape=}, {kv.shape=}, {cos_sin.shape=}, latents of {latent}")
    if cache.shape[2:] != (1, latent + turned) or cache.stride(3) != 1:
        raise ValueError(f"cache of {tuple(cache.shape)} does not hold rows of {kv.shape[1]}")
    if q.stride()[1:] != (width, 1) or kv.stride(1) != 1 or not cos_sin.is_contiguous():
        raise ValueError("heads of q, rows of kv and cos_sin must be contiguous")
    if not q.dtype == kv.dtype == cache.dtype or norm_weight.dtype not in (q.dtype, torch.float32):
        raise TypeError(f"{q.dtype=}, {kv.dtype=}, {cache.dtype=}, {norm_weight.dtype=}")
    if positions.shape != (num_tokens,) or slot_mapping.shape != (num_tokens,):
        raise ValueError(f"{num_tokens} tokens: {positions.shape=}, {slot_mapping.shape=}")
    if not positions.dtype == slot_mapping.dtype == torch.int64:
        raise TypeError("positions and slot_mapping must be int64")
    queries = q.new_empty((num_tokens, num_heads, latent + turned))
    if num_tokens == 0:
        return queries
    _rotate_write_latents_kernel[(triton.cdiv(num_heads, _HEADS) + 1, num_tokens)](
        q, kv, positions, cos_sin, norm_weight, slot_mapping, queries, cache, eps,
        q.stride(0), kv.stride(0), *cache.stride()[:2],
        H=num_heads,
        N=width - turned,
        P=turned,
        R=latent,
        BLOCK_SIZE=cache.shape[1],
        HEADS=_HEADS,
        BLOCK_HALF=triton.next_power_of_2(turned // 2),
        BLOCK_R=triton.next_power_of_2(latent),
        INTERLEAVED=is_interleaved,
        PDL=has_pdl(q),
        num_warps=2,
        **launch_options(q),
    )  # fmt: skip
    return queries


@triton.jit
def _rotate_write_latents_kernel(
    q_ptr: tl.tensor,
    kv_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    cos_sin_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    queries_ptr: tl.tensor,
    cache_ptr: tl.tensor,
    eps: tl.tensor,
    stride_q: tl.tensor,
    stride_kv: tl.tensor,
    stride_block: tl.tensor,
    stride_token: tl.tensor,
    H: tl.constexpr,
    N: tl.constexpr,
    P: tl.constexpr,
    R: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_R: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Some heads of one token, or as the first program of a token its row of the cache."""
    tile = tl.program_id(0)
    token = tl.program_id(1).to(tl.int64)
    half = tl.arange(0, BLOCK_HALF)
    is_half = half < P // 2
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = cos_sin_ptr + tl.load(positions_ptr + token) * P + half
    cos = tl.load(row, mask=is_half, other=1.0).to(tl.float32)
    sin = tl.load(row + P // 2, mask=is_half, other=0.0).to(tl.float32)
    # The numbers of a pair as they come; they leave apart.
    first = half * 2 if INTERLEAVED else half
    second = half * 2 + 1 if INTERLEAVED else half + P // 2
    if tile > 0:
        heads = (tile - 1) * HEADS + tl.arange(0, HEADS)
        inside = (heads < H)[:, None] & is_half[None, :]
        turned = q_ptr + token * stride_q + (heads * (N + P))[:, None] + N
        x1 = tl.load(turned + first[None, :], mask=inside, other=0.0)
        x2 = tl.load(turned + second[None, :], mask=inside, other=0.0)
        f1, f2 = x1.to(tl.float32), x2.to(tl.float32)
        to = queries_ptr + ((token * H + heads) * (R + P))[:, None] + R + half[None, :]
        turned1 = f1 * cos[None, :] - f2 * sin[None, :]
        turned2 = f2 * cos[None, :] + f1 * sin[None, :]
        tl.store(to, turned1.to(x1.dtype), mask=inside)
        tl.store(to + P // 2, turned2.to(x1.dtype), mask=inside)
    else:
        slot = tl.load(slots_ptr + token)
        if slot >= 0:
            to = cache_ptr + slot // BLOCK_SIZE * stride_block + slot % BLOCK_SIZE * stride_token
            r = tl.arange(0, BLOCK_R)
            is_r = r < R
            weight = tl.load(norm_ptr + r, mask=is_r, other=0.0)
            latent = tl.load(kv_ptr + token * stride_kv + r, mask=is_r, other=0.0)
            f = latent.to(tl.float32)
            normed = f * tl.rsqrt(tl.sum(f * f, 0) / R + eps)
            normed = normed.to(weight.dtype) * weight  # rounded before, unless it is float32
            tl.store(to + r, normed.to(latent.dtype), mask=is_r)
            key = kv_ptr + token * stride_kv + R
            k1 = tl.load(key + first, mask=is_half, other=0.0).to(tl.float32)
            k2 = tl.load(key + second, mask=is_half, other=0.0).to(tl.float32)
            tl.store(to + R + half, (k1 * cos - k2 * sin).to(latent.dtype), mask=is_half)
            tl.store(to + R + P // 2 + half, (k2 * cos + k1 * sin).to(latent.dtype), mask=is_half)
