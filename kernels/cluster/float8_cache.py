"""The description of a paged cache in 8-bit floats for CUDA C; `float8_tiles.cuh` reads it.

k_cache and v_cache [num_blocks, block_size, Hkv, 128] e4m3 or e5m2, block_tables [B, W] and
context_lens [B] int32, kv_scales [4, Hkv] (`kernels.fp8`)
"""

import ctypes

import torch
from torch import Tensor

from kernels import fp8

DIMS = 128
_MOST_HEADS = 8  # of queries that share a KV head
TILE = 16  # tokens
_LOG2_E = 1.4426950408889634


class Float8Cache(ctypes.Structure):
    """The source's structure of this name."""

    _fields_ = (
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("tables", ctypes.c_void_p),
        ("lengths", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("block_stride", ctypes.c_int64),
        ("table_stride", ctypes.c_int64),
        ("token_stride", ctypes.c_int),
        ("head_stride", ctypes.c_int),
        ("num_kv_heads", ctypes.c_int),
        ("group", ctypes.c_int),
        ("block_bits", ctypes.c_int),
        ("scale_log2", ctypes.c_float),
    )


def suits(dtype: torch.dtype, num_heads: int, k_cache: Tensor) -> bool:
    """True if kernels take queries of a type and a cache; its device is another question."""
    block_size, num_kv_heads, head_dim = k_cache.shape[1:]
    is_power = block_size & (block_size - 1) == 0
    return (
        dtype == torch.bfloat16
        and fp8.is_fp8(k_cache.dtype)
        and head_dim == DIMS
        and num_heads // num_kv_heads <= _MOST_HEADS
        and is_power
        and block_size >= TILE
    )


def described(
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    kv_scales: Tensor,
    num_heads: int,
    scale: float,
) -> Float8Cache:
    """The cache for a kernel. Raises ValueError or TypeError for what it does not take."""
    if k_cache.stride() != v_cache.stride() or k_cache.stride(1) % 16:
        raise ValueError(f"caches {k_cache.stride()} and {v_cache.stride()}: not alike or aligned")
    if not block_tables.dtype == context_lens.dtype == torch.int32:
        raise TypeError("block_tables and context_lens must be int32")
    strides, (block_size, num_kv_heads) = k_cache.stride(), k_cache.shape[1:3]
    return Float8Cache(
        *(tensor.data_ptr() for tensor in (k_cache, v_cache, block_tables, context_lens)),
        kv_scales.data_ptr(), strides[0], block_tables.stride(0), strides[1], strides[2],
        num_kv_heads, num_heads // num_kv_heads, block_size.bit_length() - 1, scale * _LOG2_E,
    )  # fmt: skip
