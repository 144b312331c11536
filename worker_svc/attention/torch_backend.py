"""Attention by operations of torch: of any kind, on any device, with waits for the host."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kernels import reference
from kernels.attention_kind import AttentionKind
from kernels.reference import AttentionPlan
from worker_svc.attention.batch import AttentionBatch, HeadLayout
from worker_svc.attention.call import AttentionCall, LatentInputs
from worker_svc.attention.kv_cache import KVCache
from worker_svc.attention.layer_cache import LayerCache
from worker_svc.attention.layer_kv import LayerPlace
from worker_svc.attention.page_cache import PageCache
from worker_svc.attention.rope_tables import RopeTables


@dataclass(frozen=True, slots=True)
class _Part:
    """The step's share of the attention of layers that see alike and lie alike in their blocks."""

    kind: AttentionKind
    place: LayerPlace | None
    plan: AttentionPlan
    rows: Tensor  # [N] of the tokens that are stored
    kept: Tensor | None  # [T] bool: these tokens; None: all


class TorchAttention:
    """Stores and attends in one step, whose lengths it reads once for each kind of layer."""

    name = "torch"

    def __init__(self) -> None:
        self._parts: dict[tuple[AttentionKind, int, int], _Part] = {}
        self._last: _Part | None = None  # that of the layer before

    def attend(self, call: AttentionCall) -> Tensor:
        """The call's attention [T, H, Dv]; calls of one kind and KV group bring the same batch."""
        part, kv = self._last, call.kv
        if part is None or part.kind is not call.kind or part.place is not kv.place:
            part = self._last = self._part(call)
        kept = part.kept
        _, _, k_inverse, v_inverse = (None,) * 4 if kv.scales is None else kv.scales
        if call.k is not None:
            k = call.k if kept is None else call.k[kept]
            k = k if kv.key_offsets is None else k.float() - kv.key_offsets
            reference.store(k, kv.k_rows, part.rows, k_inverse)
        if call.v is not None:
            v = call.v if kept is None else call.v[kept]
            reference.store(v, kv.v_rows, part.rows, v_inverse)
        return reference.attend(call.q, kv.rows, part.plan, call.kind, kv.scales, call.sinks)

    def _part(self, call: AttentionCall) -> _Part:
        key = call.kind, call.kv.group, call.kv.rows_per_block
        if key not in self._parts:
            self._parts[key] = _part_of(call)
        return self._parts[key]


def _part_of(call: AttentionCall) -> _Part:
    batch, kv = call.batch, call.kv
    kept = batch.slot_mapping >= 0
    both_ways = () if batch.pictures is None else batch.pictures.ranges
    plan = AttentionPlan.build(
        batch.block_tables, batch.context_lens, batch.cu_seqlens_q, kv.block_size, call.q.dtype,
        call.kind, kv.rows_per_block, both_ways,
    )  # fmt: skip
    if bool(kept.all()):
        return _Part(call.kind, kv.place, plan, kv.rows_of(batch.slot_mapping), None)
    rows = kv.rows_of(batch.slot_mapping[kept])
    return _Part(call.kind, kv.place, plan, rows, kept)


class Attends(Protocol):
    """The attention of one step."""

    def attend(self, call: AttentionCall) -> Tensor:
        """Stores the keys and values of a call, if it brings any, and attends: [T, H, Dv]."""


@dataclass(frozen=True, slots=True)
class AttentionParts:
    """The parts of a model's attention that are the same in all steps."""

    heads: Sequence[HeadLayout]  # one of each layer, as are kinds
    kinds: Sequence[AttentionKind]  # equal ones are the same
    ropes: RopeTables
    dtype: torch.dtype  # of projections; the cache may have another
    # By layer, the place in the cache of the keys and values that it reads; None: its own.
    stored_places: Sequence[int] | None = None


class AttentionStep:
    """One step's attention, called once a layer with its projections."""

    def __init__(
        self,
        parts: AttentionParts,
        batch: AttentionBatch,
        positions: Tensor,
        kv_cache: KVCache | LayerCache | PageCache,
        attention: Attends | None = None,
    ) -> None:
        """`attention` is that by torch, if it is not given."""
        self._parts = parts
        self._batch = batch
        self._kv_cache = kv_cache
        self._positions = positions
        self._rotations: dict[int, tuple[Tensor, Tensor]] = {}  # by table, once a layer wants it
        self._attention: Attends = TorchAttention() if attention is None else attention

    def __call__(
        self,
        qkv: Tensor,
        qk_norm: Tensor | None,
        eps: float,
        layer: int,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Norms, rotates, stores and attends: [T, (H + 2 Hkv) D] -> [T, H D].

        qk_norm [H + Hkv, D] is the norm weight of each head of q and k, for models that have one;
        so are `sinks` [H].
        """
        heads = self._parts.heads[layer]
        qkv = qkv.view(len(qkv), -1, heads.head_dim)
        qk, v = qkv.tensor_split((heads.num_heads + heads.num_kv_heads,), dim=1)
        if qk_norm is not None:
            qk = reference.rms_norm(qk, qk_norm, eps)
        q, k = self.rotated(qk, layer).tensor_split((heads.num_heads,), dim=1)
        return self.attended(layer, q, k, v, sinks).flatten(1)

    def over_latents(self, inputs: LatentInputs, layer: int) -> Tensor:
        """Norms, rotates, stores and attends: the weighted sums of values [T, H, V]."""
        latent = len(inputs.norm)
        nope = inputs.q.shape[2] - (inputs.kv.shape[1] - latent)
        q, q_turned = inputs.q.tensor_split((nope,), dim=-1)
        key, key_turned = inputs.kv.unsqueeze(1).tensor_split((latent,), dim=-1)
        turned = torch.cat((q_turned, key_turned), dim=1)  # [T, H + 1, P]
        if inputs.is_interleaved:
            turned = reference.pairs_apart(turned)
        q_turned, key_turned = self.rotated(turned, layer).tensor_split((q.shape[1],), dim=1)
        queries = reference.latent_queries(q, q_turned, inputs.weights)
        normed = reference.rms_norm(key, inputs.norm, inputs.eps)
        keys = torch.cat((normed, key_turned), dim=-1)  # [T, 1, R + P]
        attended = self.attended(layer, queries, keys, None)  # [T, H, R]
        return reference.latent_outputs(attended, inputs.weights)

    def normed(self, x: Tensor, norm: Tensor, eps: float) -> Tensor:
        """The RMS norm of rows of x with a weight."""
        return reference.rms_norm(x, norm, eps)

    def gated(self, x: Tensor, gate: Tensor) -> Tensor:
        """x times the sigmoid of its gates, [T, N] each."""
        return x * gate.sigmoid()

    def read(self, q: Tensor, q_norm: Tensor | None, eps: float, layer: int) -> Tensor:
        """Norms and rotates queries [T, H D] and attends to what another layer has stored.

        q_norm [H, D] is the norm weight of each head, for models that have one.
        """
        q = q.view(len(q), -1, self._parts.heads[layer].head_dim)
        if q_norm is not None:
            q = reference.rms_norm(q, q_norm, eps)
        return self.attended(layer, self.rotated(q, layer), None, None).flatten(1)

    def rotated(self, x: Tensor, layer: int) -> Tensor:
        """Heads [T, N, D] of the step's tokens, rotated as in this layer."""
        parts = self._parts
        table = parts.ropes.of_layer[layer]
        if table not in self._rotations:
            cos_sin = parts.ropes.tables[table]
            self._rotations[table] = reference.rotary_rows(cos_sin, self._positions, parts.dtype)
        return reference.rotate(x, *self._rotations[table])

    def attended(
        self,
        layer: int,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Stores keys and values of the step and attends: [T, H, D] -> [T, H, Dv].

        `v` is None where a layer's keys hold its values, and both are where they are another's.
        """
        places = self._parts.stored_places
        kv = self._kv_cache.of_layer(layer if places is None else places[layer])
        batch = self._batch.of_group(kv.group)
        call = AttentionCall(q, kv, batch, self._parts.kinds[layer], k, v, sinks)
        return self._attention.attend(call)
