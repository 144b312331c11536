"""Stand-ins for three versions of flash-attn in plain PyTorch, written from their documentation.

Each function takes the real one's arguments and no others, refuses the same arguments, and depends
on nothing but its arguments.
"""

import math
from types import ModuleType

import torch
from torch import Tensor

INT32 = torch.int32


def modules(*versions: int) -> dict[str, ModuleType]:
    """Modules that can be imported with these versions installed."""
    made: dict[str, ModuleType] = {}
    for version in versions:
        name = {4: "flash_attn.cute", 3: "flash_attn_interface", 2: "flash_attn"}[version]
        made[name] = ModuleType(name)
        for function in FUNCTIONS[version]:
            setattr(made[name], function.__name__.rpartition("_v")[0], function)
    return made


def importer(*versions: int, broken: dict[str, Exception] | None = None):
    """Replaces `importlib.import_module`; `broken` modules raise on import."""
    installed, broken = modules(*versions), broken or {}

    def load(name: str) -> ModuleType:
        if name in broken:
            raise broken[name]
        if name not in installed:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return installed[name]

    return load


def _attend(
    q: Tensor, k: Tensor, v: Tensor, tables: Tensor, used: Tensor, scale: float, causal: bool,
    window: tuple[int | None, int | None], softcap: float,
) -> Tensor:  # fmt: skip
    """Attention of q [B, S, H, D] over pages; causal from the bottom right; empty rows give 0."""
    assert tables.dtype == used.dtype == INT32
    assert tables.stride(-1) == used.stride(0) == 1
    assert q.dtype == k.dtype == v.dtype
    assert k.stride(-1) == v.stride(-1) == 1
    out = torch.zeros_like(q)
    page, share = k.shape[1], q.shape[2] // k.shape[2]
    for b in range(len(used)):
        length, queries = int(used[b]), q.shape[1]
        at = torch.arange(length, device=q.device)
        rows = tables[b, at // page].long(), at % page
        keys, values = (x[rows].float().repeat_interleave(share, 1) for x in (k, v))
        scores = torch.einsum("qhd,nhd->hqn", q[b].float(), keys) * scale
        last = torch.arange(length - queries, length, device=q.device)[:, None]
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        if causal:
            scores = scores.masked_fill(at > last, -math.inf)
        before, after = window
        if before is not None and before >= 0:
            scores = scores.masked_fill(at < last - before, -math.inf)
        if after is not None and after >= 0:
            scores = scores.masked_fill(at > last + after, -math.inf)
        weights = scores.softmax(-1).nan_to_num(0.0)
        out[b] = torch.einsum("hqn,nhd->qhd", weights, values).to(q.dtype)
    return out


def _varlen(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int, tables: Tensor, used: Tensor,
    scale: float, causal: bool, window: tuple[int | None, int | None], softcap: float,
) -> Tensor:  # fmt: skip
    assert starts.dtype == INT32
    assert starts.shape == (len(used) + 1,)
    assert longest == int(starts.diff().max())
    out = torch.zeros_like(q)
    for b in range(len(used)):
        rows = slice(int(starts[b]), int(starts[b + 1]))
        one = slice(b, b + 1)
        out[rows] = _attend(
            q[None, rows], k, v, tables[one], used[one], scale, causal, window, softcap
        )[0]
    return out


def flash_attn_varlen_func_v4(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    page_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    softcap: float = 0.0,
    num_splits: int = 1,
) -> tuple[Tensor, None]:
    assert page_table is not None
    assert seqused_k is not None
    assert softmax_scale is not None
    assert cu_seqlens_k is None  # not allowed with a page table
    if cu_seqlens_q is None:
        return _attend(
            q, k, v, page_table, seqused_k, softmax_scale, causal, window_size, softcap
        ), None
    assert max_seqlen_q is not None
    out = _varlen(
        q, k, v, cu_seqlens_q, max_seqlen_q, page_table, seqused_k, softmax_scale, causal,
        window_size, softcap,
    )  # fmt: skip
    return out, None


def flash_attn_with_kvcache_v3(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    cache_seqlens: Tensor | int | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
) -> Tensor:
    assert isinstance(cache_seqlens, Tensor)  # an int would be constant in a graph
    assert page_table is not None
    assert softmax_scale is not None
    if cu_seqlens_q is None:
        return _attend(
            q,
            k_cache,
            v_cache,
            page_table,
            cache_seqlens,
            softmax_scale,
            causal,
            window_size,
            softcap,
        )
    assert max_seqlen_q is not None
    return _varlen(
        q, k_cache, v_cache, cu_seqlens_q, max_seqlen_q, page_table, cache_seqlens, softmax_scale,
        causal, window_size, softcap,
    )  # fmt: skip


def flash_attn_with_kvcache_v2(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    cache_seqlens: Tensor | int | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    num_splits: int = 0,
) -> Tensor:
    assert isinstance(cache_seqlens, Tensor)
    assert block_table is not None
    assert softmax_scale is not None
    assert k_cache.shape[1] % 256 == 0
    return _attend(
        q, k_cache, v_cache, block_table, cache_seqlens, softmax_scale, causal, window_size, softcap
    )


def flash_attn_varlen_func_v2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    block_table: Tensor | None = None,
) -> Tensor:
    assert block_table is not None
    assert softmax_scale is not None
    assert k.shape[1] % 256 == 0
    assert cu_seqlens_k.dtype == INT32
    used = cu_seqlens_k.diff().int()
    assert max_seqlen_k >= int(used.max())
    return _varlen(
        q,
        k,
        v,
        cu_seqlens_q,
        max_seqlen_q,
        block_table,
        used,
        softmax_scale,
        causal,
        window_size,
        softcap,
    )


FUNCTIONS = {
    4: (flash_attn_varlen_func_v4,),
    3: (flash_attn_with_kvcache_v3,),
    2: (flash_attn_with_kvcache_v2, flash_attn_varlen_func_v2),
}
