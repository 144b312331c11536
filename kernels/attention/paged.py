"""What calls that attend over a paged cache share: checks, and tables of tiles."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tiles of queries, [N] int32 each; those that see the most keys should come first."""

    rows: torch.Tensor  # the sequence of each; negative: no tile
    firsts: torch.Tensor  # its first query among the sequence's own
    max_seqlen_q: int  # a tile has the `tokens_per_tile` of this length


def check_heads(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
    """q [T, H, D] and caches [num_blocks, block_size, Hkv, D]. Raises ValueError or TypeError."""
    num_heads, head_dim = q.shape[1:]
    num_kv_heads, cache_dim = k_cache.shape[2:]
    if cache_dim != head_dim or head_dim & (head_dim - 1):
        raise ValueError(f"head size {head_dim} against cache {cache_dim}; want equal powers of 2")
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} query heads do not divide among {num_kv_heads} KV heads")
    if k_cache.shape != v_cache.shape or k_cache.stride() != v_cache.stride():
        raise ValueError("k_cache and v_cache differ in shape or strides")
    if not q.dtype == k_cache.dtype == v_cache.dtype:
        raise TypeError(f"q is {q.dtype}, the cache {k_cache.dtype} and {v_cache.dtype}")
    if q.stride()[1:] != (head_dim, 1) or k_cache.stride(3) != 1:
        raise ValueError("heads of q and vectors of the cache must be contiguous")


def output_for(q: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    """Where the result goes: `out`, which must be like q and contiguous, or a new tensor."""
    out = q.new_empty(q.shape) if out is None else out
    if out.shape != q.shape or out.dtype != q.dtype or not out.is_contiguous():
        raise ValueError(f"out must be contiguous {tuple(q.shape)} of {q.dtype}")
    return out
