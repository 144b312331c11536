"""Reference implementation of every kernel in plain PyTorch; also used on CPU.

A function with the name of a kernel takes the same arguments. The parts (`rotary_rows`, `rotate`,
`AttentionPlan`, `attend`) are public, since those that depend only on the step are computed once
for all layers. Only the caches are modified.

A layer's caches are [num_blocks, block_size, Hkv, D]; token p of a sequence is in slot
`block_table[p // block_size] * block_size + p % block_size`. `attend` reads them as one tensor
[num_slots, 2, Hkv, D], with K and V of a token adjacent, which halves the gathers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import fp8

# A query tile attends to keys up to its own end, which saves half the work of a long prompt.
QUERY_TILE = 256
# A decode row is padded by at most this many keys, or to twice its own: up to there, reading
# padding costs less than another call.
MAX_FREE_PADDING = 256


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over the last dimension, in float32; the weight is applied after the cast."""
    size = x.shape[-1]
    # Concatenated with -x, x has mean 0 and its layer norm is the RMS norm: four operations instead
    # of eight, and small operations dominate a decode step on CPU.
    mirrored = F.layer_norm(torch.cat((x, -x), dim=-1), (2 * size,), eps=eps)
    return mirrored[..., :size] * weight


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(norm of x + residual, x + residual); the sum is computed in float32 and rounded once."""
    total = x + residual
    return rms_norm(total, weight, eps), total


def all_reduce(
    parts: Sequence[Tensor], residual: Tensor | None, norm_weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor | None]:
    """(sum of the ranks' parts and the residual in float32, norm of the sum if requested)."""
    total = torch.zeros_like(parts[0], dtype=torch.float32)
    for part in parts if residual is None else (*parts, residual):
        total += part.float()
    rounded = total.to(parts[0].dtype)
    if norm_weight is None:
        return rounded, None
    return rounded, rms_norm(total, norm_weight.float(), eps).to(rounded.dtype)


def silu_and_mul(x: Tensor) -> Tensor:
    """silu(first half of the last dimension) * second half."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def rotary_rows(cos_sin: Tensor, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The (cos, sin) arguments of `rotate` for these positions; equal in all layers.

    cos_sin is [P, D]: D/2 cosines, then D/2 sines, per position.
    """
    cos, sin = cos_sin[positions].to(dtype).unsqueeze(1).chunk(2, dim=-1)  # [T, 1, D/2] each
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the pairs (i, i + D/2) of each head of x [T, H, D] by the result of `rotary_rows`."""
    return (x * cos).addcmul_(x.roll(x.shape[-1] // 2, dims=-1), sin)


def rotary_embedding(
    q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor
) -> tuple[Tensor, Tensor]:
    """Rotates q [T, H, D] and k [T, Hkv, D] to their positions [T]."""
    cos, sin = rotary_rows(cos_sin, positions, q.dtype)
    return rotate(q, cos, sin), rotate(k, cos, sin)


def write_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    scales: Tensor | None = None,
) -> None:
    """Stores k and v [T, Hkv, D] in their slots [T]; negative slots are padding and skipped.

    `scales` [4, Hkv] are for caches in FP8 (`fp8`).
    """
    kept = slot_mapping >= 0
    if not bool(kept.all()):
        k, v, slot_mapping = k[kept], v[kept], slot_mapping[kept]
    store(k, k_cache.flatten(0, 1), slot_mapping, None if scales is None else scales[2])
    store(v, v_cache.flatten(0, 1), slot_mapping, None if scales is None else scales[3])


def store(x: Tensor, rows: Tensor, slots: Tensor, inverse: Tensor | None) -> None:
    """Writes x [T, Hkv, D] to these slots [T] of the rows of keys or of values of a cache.

    `inverse` [Hkv] is that of their scales, for a cache in FP8.
    """
    if inverse is None:
        rows.index_copy_(0, slots, x.to(rows.dtype))
    else:  # as bytes: torch does not index FP8 on every device
        stored = fp8.narrowed(x, inverse, rows.dtype)
        rows.view(torch.uint8).index_copy_(0, slots, stored.view(torch.uint8))


def gather(kv_rows: Tensor, slots: Tensor, dtype: torch.dtype, scales: Tensor | None) -> Tensor:
    """Keys and values of these slots [N] in this type, [N, 2, Hkv, D]."""
    if scales is None:
        return kv_rows.index_select(0, slots).to(dtype)
    stored = kv_rows.view(torch.uint8).index_select(0, slots).view(kv_rows.dtype)
    return fp8.widened(stored, scales[:2], dtype)


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Sequences with one query each, computed in one call, padded to their longest context."""

    rows: Tensor | None  # [B'] rows of q; None: all rows, in order
    slots: Tensor  # [B' * length] slot of each key
    length: int
    mask: Tensor | None  # [B', 1, 1, length], added to the scores; None: no padding


@dataclass(frozen=True, slots=True)
class QueryTile:
    """Consecutive queries of one sequence and the keys up to the last of them."""

    start: int  # first row of q
    end: int
    num_keys: int
    mask: Tensor | None  # [queries, num_keys], added to scores; None: is_causal


@dataclass(frozen=True, slots=True)
class Prefill:
    """A sequence with several queries."""

    slots: Tensor  # [context] slot of each key
    tiles: tuple[QueryTile, ...]


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """The step's part of attention: groups of queries and the slots of their keys."""

    groups: tuple[DecodeGroup, ...]
    prefills: tuple[Prefill, ...]
    covers_all: bool  # False: rows without context, which get zeros

    @classmethod
    def build(
        cls,
        block_tables: Tensor,
        context_lens: Tensor,
        cu_seqlens_q: Tensor,
        block_size: int,
        dtype: torch.dtype,
    ) -> "AttentionPlan":
        """Plans block_tables [B, W], context_lens [B], cu_seqlens_q [B + 1]; masks are of dtype."""
        contexts: list[int] = context_lens.tolist()
        starts: list[int] = cu_seqlens_q.tolist()
        lengths = [end - start for start, end in pairwise(starts)]
        live = [i for i, context in enumerate(contexts) if context > 0]
        decodes = [i for i in live if lengths[i] == 1]
        groups = tuple(
            _decode_group(group, contexts, starts, block_tables, block_size, dtype)
            for group in _similar_contexts(decodes, contexts)
        )
        prefills = tuple(
            _prefill(starts[i], starts[i + 1], contexts[i], block_tables[i], block_size, dtype)
            for i in live
            if lengths[i] > 1
        )
        return cls(groups, prefills, sum(lengths[i] for i in live) == starts[-1])


def _similar_contexts(sequences: list[int], contexts: list[int]) -> list[list[int]]:
    """Groups sequences by context length, so that little of a group is padding."""
    groups = []
    while sequences:
        longest = max(contexts[i] for i in sequences)
        least = min(longest / 2, longest - MAX_FREE_PADDING)
        groups.append([i for i in sequences if contexts[i] >= least])
        sequences = [i for i in sequences if contexts[i] < least]
    return groups


def _slots_of(block_tables: Tensor, context_lens: Tensor, length: int, block_size: int) -> Tensor:
    """Slots [B, length] of the first tokens of each sequence.

    Padding repeats the sequence's own last token: a masked key still propagates NaN, in this way
    only within the sequence.
    """
    positions = torch.arange(length, device=block_tables.device)
    positions = torch.minimum(positions, context_lens.unsqueeze(1).long() - 1)  # [B, length]
    blocks = block_tables.gather(1, positions // block_size)
    return blocks * block_size + positions % block_size


def _decode_group(
    sequences: list[int],
    contexts: list[int],
    starts: list[int],
    block_tables: Tensor,
    block_size: int,
    dtype: torch.dtype,
) -> DecodeGroup:
    device = block_tables.device
    length = max(contexts[i] for i in sequences)
    context_lens = torch.tensor([contexts[i] for i in sequences], device=device)
    if len(sequences) < len(contexts):
        block_tables = block_tables[torch.tensor(sequences, device=device)]
    slots = _slots_of(block_tables, context_lens, length, block_size)
    rows = [starts[i] for i in sequences]
    mask = None
    if min(contexts[i] for i in sequences) < length:
        padding = torch.arange(length, device=device) >= context_lens.unsqueeze(1)
        mask = torch.zeros(padding.shape, dtype=dtype, device=device)
        mask = mask.masked_fill_(padding, float("-inf"))[:, None, None, :]
    is_everything = rows == list(range(starts[-1]))
    return DecodeGroup(
        rows=None if is_everything else torch.tensor(rows, device=device),
        slots=slots.flatten(),
        length=length,
        mask=mask,
    )


def _prefill(
    start: int, end: int, context: int, block_table: Tensor, block_size: int, dtype: torch.dtype
) -> Prefill:
    device = block_table.device
    slots = _slots_of(
        block_table.unsqueeze(0), torch.tensor([context], device=device), context, block_size
    )
    num_cached = context - (end - start)
    tiles = []
    for tile_start in range(start, end, QUERY_TILE):
        tile_end = min(tile_start + QUERY_TILE, end)
        num_keys = num_cached + tile_end - start
        first = num_keys - (tile_end - tile_start)  # position of the tile's first query
        mask = None
        if first > 0:
            mask = torch.full((tile_end - tile_start, num_keys), float("-inf"), device=device)
            mask = mask.triu_(first + 1).to(dtype)
        tiles.append(QueryTile(tile_start, tile_end, num_keys, mask))
    return Prefill(slots.flatten(), tuple(tiles))


def attend(
    q: Tensor,
    kv_rows: Tensor,
    plan: AttentionPlan,
    scale: float,
    kv_scales: Tensor | None = None,
) -> Tensor:
    """Attention of q [T, H, D] by the plan -> [T, H, D]; kv_rows is [num_slots, 2, Hkv, D].

    `kv_scales` [4, Hkv] are those of a cache in FP8.
    """
    if len(plan.groups) == 1 and plan.groups[0].rows is None:
        return _attend_decode(q, kv_rows, plan.groups[0], scale, kv_scales)
    out = torch.empty_like(q) if plan.covers_all else torch.zeros_like(q)
    for group in plan.groups:
        rows = slice(None) if group.rows is None else group.rows
        out[rows] = _attend_decode(q[rows], kv_rows, group, scale, kv_scales)
    for prefill in plan.prefills:
        _attend_prefill(q, kv_rows, prefill, scale, out, kv_scales)
    return out


def _attend_decode(
    q: Tensor, kv_rows: Tensor, group: DecodeGroup, scale: float, kv_scales: Tensor | None
) -> Tensor:
    num_seqs, num_heads, head_dim = q.shape
    num_kv_heads = kv_rows.shape[2]
    kv = gather(kv_rows, group.slots, q.dtype, kv_scales)
    kv = kv.view(num_seqs, group.length, 2, num_kv_heads, head_dim)
    k, v = kv.permute(2, 0, 3, 1, 4).unbind()  # [B, Hkv, L, D] each
    # The query heads of a KV head become its queries, so that K and V are read once.
    q = q.reshape(num_seqs, num_kv_heads, num_heads // num_kv_heads, head_dim)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=group.mask, scale=scale)
    return out.reshape(num_seqs, num_heads, head_dim)


def _attend_prefill(
    q: Tensor,
    kv_rows: Tensor,
    prefill: Prefill,
    scale: float,
    out: Tensor,
    kv_scales: Tensor | None,
) -> None:
    num_heads, num_kv_heads = q.shape[1], kv_rows.shape[2]
    share = num_heads // num_kv_heads
    kv = gather(kv_rows, prefill.slots, q.dtype, kv_scales).permute(1, 2, 0, 3)  # [2, Hkv, L, D]
    k, v = kv.unsqueeze(2).expand(-1, -1, share, -1, -1)  # [Hkv, share, L, D] without a copy
    for tile in prefill.tiles:
        queries = q[tile.start : tile.end].view(-1, num_kv_heads, share, q.shape[2])
        attended = F.scaled_dot_product_attention(
            queries.permute(1, 2, 0, 3),
            k[:, :, : tile.num_keys],
            v[:, :, : tile.num_keys],
            attn_mask=tile.mask,
            is_causal=tile.mask is None,
            scale=scale,
        )
        out[tile.start : tile.end] = attended.permute(2, 0, 1, 3).flatten(1, 2)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    scale: float,
    kv_scales: Tensor | None = None,
) -> Tensor:
    """Causal attention of each sequence's last queries over its cached context.

    Sequence i has queries q[cu_seqlens_q[i] : cu_seqlens_q[i + 1]]; the last one is at position
    context_lens[i] - 1. The output of a sequence without context is zero.
    """
    plan = AttentionPlan.build(block_tables, context_lens, cu_seqlens_q, k_cache.shape[1], q.dtype)
    kv_rows = torch.stack((k_cache.flatten(0, 1), v_cache.flatten(0, 1)), dim=1)
    return attend(q, kv_rows, plan, scale, kv_scales)


def paged_decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    scale: float,
    kv_scales: Tensor | None = None,
) -> Tensor:
    """`paged_attention` with one query per sequence, q [B, H, D]."""
    cu_seqlens_q = torch.arange(q.shape[0] + 1, dtype=torch.int32, device=q.device)
    return paged_attention(
        q, k_cache, v_cache, block_tables, context_lens, cu_seqlens_q, 1, scale, kv_scales
    )


def restrict_rows(
    logits: Tensor, rows: Tensor, masks_of_rows: Tensor, was_finite: Tensor, masks: Tensor
) -> Tensor:
    """Of each row only what its mask allows, NaN if that is nothing; returns `has_choice` [N].

    What is not allowed has the lowest finite logit. Only the first logit of a row becomes NaN.
    """
    changed = logits[rows]
    bits = (masks[:, :, None] >> torch.arange(32, dtype=torch.int32)) & 1
    forbidden = bits.flatten(1)[masks_of_rows.clamp(min=0), : logits.shape[1]] == 0
    changed[forbidden & (masks_of_rows >= 0)[:, None]] = float("-inf")
    largest = changed.amax(-1)
    has_choice = largest != float("-inf")
    finite = was_finite & (largest.isfinite() | ~has_choice)
    changed.clamp_(min=torch.finfo(torch.float32).min)
    changed[~(finite & has_choice), 0] = float("nan")
    logits[rows] = changed
    return has_choice | ~finite
