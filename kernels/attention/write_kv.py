# mypy: disable-error-code="untyped-decorator"
"""Write this step's keys and values into their slots of the paged cache.

    k, v [T, Hkv, D], slot_mapping [T]  ->  k_cache, v_cache [num_blocks, block_size, Hkv, D]

A negative slot is padding: nothing is read or written for it.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.pdl import has_pdl, launch_options


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Copy row t of `k` and `v` to slot `block * block_size + offset` of the caches, in place."""
    num_tokens, num_kv_heads, head_dim = k.shape
    if k.shape != v.shape or k.stride() != v.stride() or k.stride()[1:] != (head_dim, 1):
        raise ValueError("k and v must agree in shape and strides, their heads contiguous")
    if k_cache.shape != v_cache.shape or k_cache.stride() != v_cache.stride():
        raise ValueError("k_cache and v_cache differ in shape or strides")
    if k_cache.shape[2:] != k.shape[1:] or k_cache.stride(3) != 1:
        raise ValueError(f"cache of {tuple(k_cache.shape)} does not hold {tuple(k.shape[1:])}")
    if not k.dtype == v.dtype == k_cache.dtype == v_cache.dtype:
        raise TypeError(f"k is {k.dtype}, v {v.dtype}, the caches {k_cache.dtype}, {v_cache.dtype}")
    if slot_mapping.shape != (num_tokens,) or slot_mapping.dtype != torch.int64:
        raise ValueError(f"slot_mapping must be int64 [{num_tokens}]")
    if num_tokens == 0:
        return
    _write_kv_kernel[(num_tokens,)](
        k, v, k_cache, v_cache, slot_mapping,
        k.stride(0), *k_cache.stride()[:3],
        BLOCK_SIZE=k_cache.shape[1],
        HEADS=num_kv_heads,
        D=head_dim,
        BLOCK=triton.next_power_of_2(num_kv_heads * head_dim),
        PDL=has_pdl(k),
        **launch_options(k),
    )  # fmt: skip


@triton.jit
def _write_kv_kernel(
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    k_cache_ptr: tl.tensor,
    v_cache_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    stride_kv: tl.tensor,
    stride_block: tl.tensor,
    stride_token: tl.tensor,
    stride_head: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    slot = tl.load(slots_ptr + token)
    if slot < 0:
        return
    i = tl.arange(0, BLOCK)
    inside = i < HEADS * D
    to = slot // BLOCK_SIZE * stride_block + slot % BLOCK_SIZE * stride_token
    to += i // D * stride_head + i % D
    k = tl.load(k_ptr + token * stride_kv + i, mask=inside)
    v = tl.load(v_ptr + token * stride_kv + i, mask=inside)
    tl.store(k_cache_ptr + to, k, mask=inside)
    tl.store(v_cache_ptr + to, v, mask=inside)
