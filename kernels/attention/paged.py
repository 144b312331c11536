"""Common parts of calls that attend over a paged cache: checks, and tables of tiles."""

from dataclasses import dataclass

import torch

from kernels import fp8
from kernels.attention_kind import AttentionKind


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tiles of queries, [N] int32 each; those that see the most keys should come first."""

    rows: torch.Tensor  # the sequence of each; negative: no tile
    firsts: torch.Tensor  # its first query among the sequence's own
    max_seqlen_q: int  # a tile has the `tokens_per_tile` of this length


def check_heads(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    kv_scales: torch.Tensor | None = None,
) -> None:
    """q [T, H, D] and caches [num_blocks, block_size, Hkv, D]. Raises ValueError or TypeError.

    Caches in FP8 have scales [4, Hkv] (`kernels.fp8`), others are of the type of q.
    """
    num_heads, head_dim = q.shape[1:]
    num_kv_heads, cache_dim = k_cache.shape[2:]
    if cache_dim != head_dim or head_dim & (head_dim - 1):
        raise ValueError(f"head size {head_dim} against cache {cache_dim}; want equal powers of 2")
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} query heads do not divide among {num_kv_heads} KV heads")
    if k_cache.shape != v_cache.shape or k_cache.stride() != v_cache.stride():
        raise ValueError("k_cache and v_cache differ in shape or strides")
    check_types(q.dtype, k_cache, v_cache, kv_scales)
    if q.stride()[1:] != (head_dim, 1) or k_cache.stride(3) != 1:
        raise ValueError("heads of q and vectors of the cache must be contiguous")


def check_types(
    dtype: torch.dtype,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    kv_scales: torch.Tensor | None,
) -> None:
    """Raises TypeError or ValueError unless the caches are of this type, or FP8 with scales."""
    if k_cache.dtype != v_cache.dtype or not (k_cache.dtype == dtype or kv_scales is not None):
        raise TypeError(f"q is {dtype}, the cache {k_cache.dtype} and {v_cache.dtype}")
    fp8.check_scales(kv_scales, k_cache.dtype, k_cache.shape[2])


def output_for(q: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    """The tensor for the result: `out`, which must be like q and contiguous, or a new one."""
    out = q.new_empty(q.shape) if out is None else out
    if out.shape != q.shape or out.dtype != q.dtype or not out.is_contiguous():
        raise ValueError(f"out must be contiguous {tuple(q.shape)} of {q.dtype}")
    return out


def check_sinks(kind: AttentionKind, sinks: torch.Tensor | None, num_heads: int) -> None:
    """Raises ValueError unless there is a sink for each head where the kind has them, else none.

    Also for a chunk, which no kernel has.
    """
    if kind.has_sinks != (sinks is not None) or (sinks is not None and len(sinks) != num_heads):
        raise ValueError(f"{kind} with {num_heads} heads, and sinks {sinks}")
    if kind.chunk is not None:
        raise ValueError(f"{kind} is not served by the kernels")
