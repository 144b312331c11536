"""Reference implementation of every kernel in plain PyTorch; also used on CPU.

A function with the name of a kernel takes the same arguments. The parts (`rotary_rows`, `rotate`,
`AttentionPlan`, `attend`) are public, since those that depend only on the step are computed once
for all layers. Only the caches are modified.

A layer's caches are [num_blocks, block_size, Hkv, D]; token p of a sequence is in slot
`block_table[p // block_size] * block_size + p % block_size`. `attend` reads them as one tensor
[num_slots, 2, Hkv, D], with K and V of a token adjacent, which halves the gathers; where their
sizes differ, as two.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import fp8
from kernels.attention_kind import AttentionKind
from kernels.expert_clamp import Clamp

# A query tile attends to keys up to its own end, which saves half the work of a long prompt.
QUERY_TILE = 256
# A decode row is padded by at most this many keys, or to twice its own: up to there, reading
# padding costs less than another call.
MAX_FREE_PADDING = 256


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over the last dimension, in float32; the weight is applied after the cast.

    A weight of float32 is applied before it.
    """
    if weight.dtype != x.dtype:
        return rms_norm(x.float(), weight, eps).to(x.dtype)
    size = x.shape[-1]
    # Concatenated with -x, x has mean 0 and its layer norm is the RMS norm: four operations instead
    # of eight, and small operations dominate a decode step on CPU.
    mirrored = F.layer_norm(torch.cat((x, -x), dim=-1), (2 * size,), eps=eps)
    return mirrored[..., :size] * weight


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """(norm of scale * x + residual, and that sum), computed in float32 and rounded once."""
    total = torch.add(residual, x, alpha=scale)
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


def gelu_and_mul(x: Tensor) -> Tensor:
    """gelu(first half of the last dimension), approximated by tanh, * second half."""
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)


def relu2(x: Tensor) -> Tensor:
    """The square of what is above 0."""
    return F.relu(x).square()


def clamped_and_mul(x: Tensor, clamp: Clamp) -> Tensor:
    """The activation of experts that clamp, of gate and up side by side: see `Clamp`."""
    gate, up = x.chunk(2, dim=-1)
    gate, up = gate.clamp(max=clamp.limit), up.clamp(-clamp.limit, clamp.limit)
    return (up + 1) * (gate * torch.sigmoid(gate * clamp.alpha))


def choose_experts(
    logits: Tensor,
    top_k: int,
    renormalizes: bool,
    *,
    is_sigmoid: bool = False,
    bias: Tensor | None = None,
    scale: float = 1.0,
    epsilon: float = 1e-20,
    groups: tuple[int, int] = (1, 1),
) -> tuple[Tensor, Tensor]:
    """A router's logits [T, E] -> experts' weights in float32 and indices, [T, top_k] each.

    Scores are a softmax or, with `is_sigmoid`, sigmoids. Those with the largest sum of score and
    `bias` [E] are chosen; their weights are the scores, divided by their sum and
    `epsilon` with `renormalizes`, times `scale`. `groups` is the number of groups of consecutive
    experts, and of those that a token may choose from: the ones whose two largest sums add up to
    the most.
    """
    scores = _sigmoid(logits.float()) if is_sigmoid else logits.float().softmax(-1)
    keys = scores if bias is None else scores + bias
    if groups[1] < groups[0]:
        keys = _of_best_groups(keys, *groups)
    chosen = keys.topk(top_k, -1).indices
    weights = scores.gather(-1, chosen)
    if renormalizes:
        weights = weights / (weights.sum(-1, keepdim=True) + epsilon)
    return weights * scale, chosen


def _of_best_groups(keys: Tensor, count: int, kept: int) -> Tensor:
    """The keys [T, E] by which experts are chosen; -inf outside of the `kept` best groups."""
    grouped = keys.view(len(keys), count, -1)
    best = grouped.topk(2, -1).values.sum(-1).topk(kept, -1).indices  # [T, kept]
    left_out = torch.ones(grouped.shape[:2], dtype=torch.bool, device=keys.device)
    left_out.scatter_(1, best, value=False)
    return grouped.masked_fill(left_out[..., None], float("-inf")).flatten(-2)


def _sigmoid(x: Tensor) -> Tensor:
    """The sigmoid of float32, of bits that do not depend on the place in the tensor.

    On a CPU torch computes the last numbers of a tensor by other instructions: what differs in
    float64 then is rounded off.
    """
    return x.double().sigmoid().float() if x.device.type == "cpu" else x.sigmoid()


def with_shared_experts(
    weights: Tensor, chosen: Tensor, first: int, count: int, gate: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Adds experts from `first` on that every row has: weights and chosen, [T, top_k + count] each.

    Their weight is 1, or the sigmoid of `gate` [T].
    """
    shared = torch.arange(first, first + count, device=chosen.device).expand(len(chosen), count)
    ones = torch.ones_like(weights[:, :1]) if gate is None else _sigmoid(gate.float())[:, None]
    return torch.cat((weights, ones.expand(-1, count)), 1), torch.cat((chosen, shared), 1)


def feed_experts(
    x: Tensor,
    weights: Tensor,
    chosen: Tensor,
    gate_ups: Sequence[Callable[[Tensor], Tensor]],
    downs: Sequence[Callable[[Tensor], Tensor]],
    act: Callable[[Tensor], Tensor] = silu_and_mul,
) -> Tensor:
    """x [T, h], and the weights and the indices of each row's experts [T, k] -> [T, h].

    An expert is the product with its gate and up matrices, then that with its down matrix, and in
    between `act`. The weighted sum is in float32.
    """
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in chosen.flatten().bincount().nonzero()[:, 0].tolist():
        rows, places = (chosen == expert).nonzero(as_tuple=True)
        y = downs[expert](act(gate_ups[expert](x[rows])))
        out.index_add_(0, rows, y.float() * weights[rows, places, None])
    return out.to(x.dtype)


def rotary_rows(cos_sin: Tensor, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The (cos, sin) arguments of `rotate` for these positions; equal in all layers.

    cos_sin is [P, R]: R/2 cosines, then R/2 sines, per position.
    """
    cos, sin = cos_sin[positions].to(dtype).unsqueeze(1).chunk(2, dim=-1)  # [T, 1, R/2] each
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the pairs (i, i + R/2) of each head of x [T, H, D] by the result of `rotary_rows`.

    R is the width of a row; the dimensions after R stay.
    """
    size = cos.shape[-1]
    if size < x.shape[-1]:
        return torch.cat((rotate(x[..., :size], cos, sin), x[..., size:]), dim=-1)
    return (x * cos).addcmul_(x.roll(x.shape[-1] // 2, dims=-1), sin)


def pairs_apart(x: Tensor) -> Tensor:
    """Moves the pairs (2i, 2i + 1) of the last dimension to (i, i + D/2), as `rotate` has them."""
    return x.reshape(*x.shape[:-1], -1, 2).transpose(-1, -2).flatten(-2)


class LatentWeights(NamedTuple):
    """The products that make keys and values of a latent, which queries and outputs absorb."""

    keys: Tensor  # [H, N, R]
    values: Tensor  # [H, V, R]


def latent_queries(q: Tensor, rotated: Tensor, weights: LatentWeights) -> Tensor:
    """Queries [T, H, N] and rotated ones [T, H, P] -> [T, H, R + P], for keys of a latent.

    A key is a latent [R] and a rotated key [P] of all heads, and the score of head h with it is
    `q[h] . (keys[h] latent) + rotated[h] . rotated key`.
    """
    return torch.cat((torch.einsum("thn,hnr->thr", q, weights.keys), rotated), dim=-1)


def latent_outputs(attended: Tensor, weights: LatentWeights) -> Tensor:
    """Weighted sums of latents [T, H, R] -> those of the values, [T, H, V]."""
    return torch.einsum("thr,hvr->thv", attended, weights.values)


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
    key_offsets: Tensor | None = None,
) -> None:
    """Stores k and v [T, Hkv, D] in their slots [T]; negative slots are padding and skipped.

    `scales` [4, Hkv] and `key_offsets` [Hkv, D] are for caches in FP8 (`fp8`).
    """
    kept = slot_mapping >= 0
    if not bool(kept.all()):
        k, v, slot_mapping = k[kept], v[kept], slot_mapping[kept]
    k = k if key_offsets is None else k.float() - key_offsets
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


class KvRows(NamedTuple):
    """Keys [num_slots, Hkv, D] and values [num_slots, Hkv, Dv] of a layer, apart."""

    keys: Tensor
    values: Tensor


class LatentRows(NamedTuple):
    """Keys [num_slots, Hkv, D] of a layer, of which the first dimensions are the values."""

    keys: Tensor
    v_dim: int

    @property
    def values(self) -> Tensor:
        """The values [num_slots, Hkv, Dv], which are no memory of their own."""
        return self.keys[..., : self.v_dim]


def gather(
    kv_rows: Tensor | KvRows | LatentRows, slots: Tensor, dtype: torch.dtype, scales: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Keys [N, Hkv, D] and values [N, Hkv, Dv] of these slots [N] in this type."""
    if isinstance(kv_rows, LatentRows):  # read once
        keys = kv_rows.keys.index_select(0, slots).to(dtype)
        return keys, keys[..., : kv_rows.v_dim]
    if isinstance(kv_rows, KvRows):
        keys, values = (rows.index_select(0, slots).to(dtype) for rows in kv_rows)
        return keys, values
    if scales is None:
        k, v = kv_rows.index_select(0, slots).to(dtype).unbind(1)
        return k, v
    stored = kv_rows.view(torch.uint8).index_select(0, slots).view(kv_rows.dtype)
    k, v = fp8.widened(stored, scales[:2], dtype).unbind(1)
    return k, v


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Sequences with one query each, computed in one call, padded to the most keys of one."""

    rows: Tensor | None  # [B'] rows of q; None: all rows, in order
    slots: Tensor  # [B' * length] slot of each key
    length: int
    mask: Tensor | None  # [B', 1, 1, length], added to the scores; None: no padding


@dataclass(frozen=True, slots=True)
class QueryTile:
    """Consecutive queries of one sequence and the keys that at least one of them sees."""

    start: int  # first row of q
    end: int
    first_key: int  # among the keys of the prefill
    end_key: int
    mask: Tensor | None  # [queries, keys], added to scores; None: is_causal


@dataclass(frozen=True, slots=True)
class Prefill:
    """A sequence with several queries."""

    slots: Tensor  # [keys] slot of each key that a query sees
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
        kind: AttentionKind,
        rows_per_block: int | None = None,
        both_ways: Sequence[tuple[int, int]] = (),
    ) -> "AttentionPlan":
        """Plans block_tables [B, W], context_lens [B], cu_seqlens_q [B + 1]; masks are of dtype.

        It depends on the keys that queries of the kind see, and on no more of it. `rows_per_block`
        is how many slots one block lies after another, if not `block_size`. No block is looked up
        whose keys no query sees: a table may name another sequence's there. `both_ways` are ranges
        of rows, each of one sequence and one step, that see the later ones of their range, too.
        """
        blocks = _Blocks(block_tables, block_size, rows_per_block or block_size)
        contexts: list[int] = context_lens.tolist()
        starts: list[int] = cu_seqlens_q.tolist()
        lengths = [end - start for start, end in pairwise(starts)]
        live = [i for i, context in enumerate(contexts) if context > 0]
        decodes = [i for i in live if lengths[i] == 1]
        firsts = [kind.first_key(context - 1) for context in contexts]
        groups = tuple(
            _decode_group(group, firsts, contexts, starts, blocks, dtype)
            for group in _similar_contexts(
                decodes, [c - f for c, f in zip(contexts, firsts, strict=True)]
            )
        )
        prefills = tuple(
            _prefill(
                starts[i], starts[i + 1], contexts[i], blocks.of_one(i), dtype, kind, both_ways
            )
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


@dataclass(frozen=True, slots=True)
class _Blocks:
    """The blocks of B sequences, and how slots lie in them."""

    tables: Tensor  # [B, W]
    block_size: int
    rows_per_block: int

    def of(self, sequences: list[int]) -> "_Blocks":
        """The blocks of some sequences."""
        if sequences == list(range(len(self.tables))):
            return self
        tables = self.tables[torch.tensor(sequences, device=self.tables.device)]
        return _Blocks(tables, self.block_size, self.rows_per_block)

    def of_one(self, sequence: int) -> "_Blocks":
        """The blocks of one sequence."""
        tables = self.tables[sequence : sequence + 1]
        return _Blocks(tables, self.block_size, self.rows_per_block)

    def slots(self, firsts: Tensor | None, ends: Tensor, length: int) -> Tensor:
        """Slots [B, length] of the tokens of each sequence from its first one [B] on; None: from 0.

        Padding repeats the sequence's own last token before its end [B]: a masked key still
        propagates NaN, in this way only within the sequence.
        """
        positions = torch.arange(length, device=self.tables.device)
        if firsts is not None:
            positions = positions + firsts.unsqueeze(1)
        positions = torch.minimum(positions, ends.unsqueeze(1).long() - 1)  # [B, length]
        blocks = self.tables.gather(1, positions // self.block_size)
        return blocks * self.rows_per_block + positions % self.block_size


def _decode_group(
    sequences: list[int],
    firsts: list[int],
    contexts: list[int],
    starts: list[int],
    blocks: _Blocks,
    dtype: torch.dtype,
) -> DecodeGroup:
    device = blocks.tables.device
    lengths = [contexts[i] - firsts[i] for i in sequences]
    length = max(lengths)
    context_lens = torch.tensor([contexts[i] for i in sequences], device=device)
    first_keys = None
    if any(firsts[i] for i in sequences):
        first_keys = torch.tensor([firsts[i] for i in sequences], device=device)
    slots = blocks.of(sequences).slots(first_keys, context_lens, length)
    rows = [starts[i] for i in sequences]
    mask = None
    if min(lengths) < length:
        counts = torch.tensor(lengths, device=device).unsqueeze(1)
        padding = torch.arange(length, device=device) >= counts
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
    start: int,
    end: int,
    context: int,
    blocks: _Blocks,
    dtype: torch.dtype,
    kind: AttentionKind,
    both_ways: Sequence[tuple[int, int]],
) -> Prefill:
    """`blocks` are those of the one sequence."""
    device = blocks.tables.device
    num_cached = context - (end - start)
    first_seen = kind.first_key(num_cached)
    firsts = torch.tensor([first_seen], device=device) if first_seen else None
    slots = blocks.slots(firsts, torch.tensor([context], device=device), context - first_seen)
    tiles = []
    for tile_start in range(start, end, QUERY_TILE):
        tile_end = min(tile_start + QUERY_TILE, end)
        after = num_cached + tile_end - start  # position after the tile's last query
        first = after - (tile_end - tile_start)  # position of the tile's first query
        ranges = [
            (num_cached + begin - start, num_cached + end_ - start)
            for begin, end_ in both_ways
            if begin < tile_end and tile_start < end_
        ]
        end_key = max([after, *(end_ for _, end_ in ranges)])
        first_key = kind.first_key(first)
        mask = None
        if first > 0 or not kind.sees_all or ranges:
            queries = torch.arange(first, after, device=device).unsqueeze(1)
            keys = torch.arange(first_key, end_key, device=device)
            hidden = kind.hides(queries, keys)
            for begin, end_ in ranges:  # later ones are in every window
                inside = (queries >= begin) & (queries < end_)
                hidden &= ~(inside & (keys > queries) & (keys < end_))
            mask = torch.zeros((after - first, end_key - first_key), dtype=dtype, device=device)
            mask = mask.masked_fill_(hidden, float("-inf"))
        keys_seen = first_key - first_seen, end_key - first_seen
        tiles.append(QueryTile(tile_start, tile_end, *keys_seen, mask))
    return Prefill(slots.flatten(), tuple(tiles))


def attend(
    q: Tensor,
    kv_rows: Tensor | KvRows | LatentRows,
    plan: AttentionPlan,
    kind: AttentionKind,
    kv_scales: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of q [T, H, D] by the plan -> [T, H, Dv].

    `kv_rows` is [num_slots, 2, Hkv, D], or keys and values apart. `kv_scales` [4, Hkv] are those of
    a cache in FP8, `sinks` [H] those of a kind that has some.
    """
    if kind.has_sinks != (sinks is not None):
        raise ValueError(f"{kind}, and sinks {sinks}")
    if len(plan.groups) == 1 and plan.groups[0].rows is None:
        return _attend_decode(q, kv_rows, plan.groups[0], kind, kv_scales, sinks)
    v_dim = (kv_rows if isinstance(kv_rows, Tensor) else kv_rows.values).shape[-1]
    shape = (*q.shape[:2], v_dim)
    out = q.new_empty(shape) if plan.covers_all else q.new_zeros(shape)
    for group in plan.groups:
        rows = slice(None) if group.rows is None else group.rows
        out[rows] = _attend_decode(q[rows], kv_rows, group, kind, kv_scales, sinks)
    for prefill in plan.prefills:
        _attend_prefill(q, kv_rows, prefill, kind, out, kv_scales, sinks)
    return out


def _attend_decode(
    q: Tensor,
    kv_rows: Tensor | KvRows | LatentRows,
    group: DecodeGroup,
    kind: AttentionKind,
    kv_scales: Tensor | None,
    sinks: Tensor | None,
) -> Tensor:
    num_seqs, num_heads, head_dim = q.shape
    # [B, Hkv, L, D] each
    k, v = (
        x.view(num_seqs, group.length, *x.shape[1:]).transpose(1, 2)
        for x in gather(kv_rows, group.slots, q.dtype, kv_scales)
    )
    num_kv_heads = k.shape[1]
    # The query heads of a KV head become its queries, so that K and V are read once.
    q = q.reshape(num_seqs, num_kv_heads, num_heads // num_kv_heads, head_dim)
    if kind.softcap is None and sinks is None:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=group.mask, scale=kind.scale)
    else:
        out = _weighed(q, k, v, group.mask, kind, sinks, (num_kv_heads, -1, 1))
    return out.reshape(num_seqs, num_heads, v.shape[-1])


def _attend_prefill(
    q: Tensor,
    kv_rows: Tensor | KvRows | LatentRows,
    prefill: Prefill,
    kind: AttentionKind,
    out: Tensor,
    kv_scales: Tensor | None,
    sinks: Tensor | None,
) -> None:
    num_heads = q.shape[1]
    keys, values = gather(kv_rows, prefill.slots, q.dtype, kv_scales)  # [L, Hkv, D]
    num_kv_heads = keys.shape[1]
    share = num_heads // num_kv_heads
    k, v = (  # [Hkv, share, L, D] without a copy
        x.transpose(0, 1).unsqueeze(1).expand(-1, share, -1, -1) for x in (keys, values)
    )
    for tile in prefill.tiles:
        queries = q[tile.start : tile.end].view(-1, num_kv_heads, share, q.shape[2])
        queries = queries.permute(1, 2, 0, 3)
        k_seen = k[:, :, tile.first_key : tile.end_key]
        v_seen = v[:, :, tile.first_key : tile.end_key]
        if kind.softcap is None and sinks is None:
            attended = F.scaled_dot_product_attention(
                queries,
                k_seen,
                v_seen,
                attn_mask=tile.mask,
                is_causal=tile.mask is None,
                scale=kind.scale,
            )
        else:
            mask = _causal(queries) if tile.mask is None else tile.mask
            shape = num_kv_heads, share, 1, 1
            attended = _weighed(queries, k_seen, v_seen, mask, kind, sinks, shape)
        out[tile.start : tile.end] = attended.permute(2, 0, 1, 3).flatten(1, 2)


def _weighed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    kind: AttentionKind,
    sinks: Tensor | None,
    heads: tuple[int, ...],
) -> Tensor:
    """Attention [..., Q, D], [..., L, D] and [..., L, Dv] -> [..., Q, Dv], weights in float32.

    `heads` is the shape in which the heads' sinks are broadcast to the scores.
    """
    scores = (q @ k.transpose(-1, -2)).float() * kind.scale
    if kind.softcap is not None:
        scores = torch.tanh(scores / kind.softcap) * kind.softcap
    if mask is not None:
        scores = scores + mask
    if sinks is None:
        return scores.softmax(-1).to(v.dtype) @ v
    shares = sinks.float().view(heads).expand(*scores.shape[:-1], 1)
    weights = torch.cat((scores, shares), dim=-1).softmax(-1)[..., :-1]
    return weights.to(v.dtype) @ v


def _causal(q: Tensor) -> Tensor:
    """The mask [Q, Q] of queries [..., Q, D] that see the keys up to their own."""
    num_queries = q.shape[-2]
    mask = torch.full((num_queries, num_queries), float("-inf"), device=q.device)
    return mask.triu_(1)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    kind: AttentionKind,
    kv_scales: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of each sequence's last queries over its cached context.

    Sequence i has queries q[cu_seqlens_q[i] : cu_seqlens_q[i + 1]]; the last one is at position
    context_lens[i] - 1. The output of a sequence without context is zero. `sinks` are [H].
    """
    plan = AttentionPlan.build(
        block_tables, context_lens, cu_seqlens_q, k_cache.shape[1], q.dtype, kind
    )
    kv_rows = torch.stack((k_cache.flatten(0, 1), v_cache.flatten(0, 1)), dim=1)
    return attend(q, kv_rows, plan, kind, kv_scales, sinks)


def latent_attention(
    q: Tensor,
    cache: Tensor,
    v_dim: int,
    block_tables: Tensor,
    context_lens: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    kind: AttentionKind,
) -> Tensor:
    """`paged_attention` of q [T, H, D] over keys of all heads [num_blocks, block_size, 1, D].

    Their first `v_dim` dimensions are the values: [T, H, v_dim].
    """
    plan = AttentionPlan.build(
        block_tables, context_lens, cu_seqlens_q, cache.shape[1], q.dtype, kind
    )
    return attend(q, LatentRows(cache.flatten(0, 1), v_dim), plan, kind)


def paged_decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    kind: AttentionKind,
    kv_scales: Tensor | None = None,
) -> Tensor:
    """`paged_attention` with one query per sequence, q [B, H, D]."""
    cu_seqlens_q = torch.arange(q.shape[0] + 1, dtype=torch.int32, device=q.device)
    return paged_attention(
        q, k_cache, v_cache, block_tables, context_lens, cu_seqlens_q, 1, kind, kv_scales
    )


def restrict_rows(
    logits: Tensor, rows: Tensor, masks_of_rows: Tensor, was_finite: Tensor, masks: Tensor
) -> Tensor:
    """Leaves each row only what its mask allows, NaN if that is nothing; returns `has_choice` [N].

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
