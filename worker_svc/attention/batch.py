"""Attention of one step: what the batch looks like, and how each layer attends.

Everything that depends on the step alone is made once, in `AttentionStep`; a layer brings its
projections and its cache. Which implementation runs is chosen here and nowhere else.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import reference
from kernels.attention.paged import Tiles
from worker_svc.attention.kv_cache import KVCache
from worker_svc.attention.rope_tables import RopeTables


@dataclass(frozen=True, slots=True)
class MixedBatch:
    """Who attends to what in a step whose shape only the device knows, as a graph needs it."""

    num_decodes: Tensor  # [1] int32: the leading sequences that compute one token each
    decode_lens: Tensor  # [B] int32, their contexts; -1 for all other sequences
    tiles: Tiles  # of the others' queries


@dataclass(frozen=True, slots=True)
class StateCut:
    """A place between a sequence's tokens whose states go into a snapshot."""

    sequence: int
    num_tokens: int  # of the sequence's, before it
    snapshot: int


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Where this step's T tokens of B sequences lie and what they may see."""

    slot_mapping: Tensor  # [T] int64, KV slot of each token; negative: padding, not written
    block_tables: Tensor  # [B, W] int32, filled up with the null block 0
    context_lens: Tensor  # [B] int32, tokens with KV after this step
    cu_seqlens_q: Tensor  # [B + 1] int32
    max_seqlen_q: int
    max_context_len: int
    # The leading sequences that compute one token each, and the others; where that is worth a
    # launch more.
    parts: "tuple[AttentionBatch, AttentionBatch] | None" = None
    mixed: MixedBatch | None = None  # in place of parts and lengths, in a graph
    # [B]: whose states each sequence has, of padding below 0; None: of none.
    slots: Tensor | None = None
    state_cuts: tuple[StateCut, ...] = ()  # in order of sequences and tokens
    # The same for layers of the KV groups after group 0, which have block tables of their own.
    others: "tuple[AttentionBatch, ...]" = ()

    @classmethod
    def of_decodes(
        cls,
        slot_mapping: Tensor,
        block_tables: Tensor,
        context_lens: Tensor,
        max_context_len: int,
        slots: Tensor | None = None,
    ) -> "AttentionBatch":
        """A batch of sequences that compute one token each, so T = B."""
        return cls(
            slot_mapping=slot_mapping,
            block_tables=block_tables,
            context_lens=context_lens,
            cu_seqlens_q=context_lens,  # a decode batch does not look at it
            max_seqlen_q=1,
            max_context_len=max_context_len,
            slots=slots,
        )

    @property
    def is_decode(self) -> bool:
        """Whether every sequence computes exactly one token."""
        return self.max_seqlen_q == 1

    def of_group(self, group: int) -> "AttentionBatch":
        """The batch for layers of a KV group."""
        return self.others[group - 1] if group else self


@dataclass(frozen=True, slots=True)
class LastTokens:
    """The tokens whose logits are wanted: each the last of its sequence, which it attends to."""

    rows: Tensor  # [R] int64, of the step's T
    attention: AttentionBatch  # of R sequences that compute one token each


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """How a row of the fused projection divides: the heads of q, then of k, then of v."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def scale(self) -> float:
        return 1.0 / math.sqrt(self.head_dim)


def fuses(head_dim: int) -> bool:
    """Whether the Triton kernels have tiles for heads of this size."""
    return head_dim >= 16 and head_dim & (head_dim - 1) == 0


class AttentionStep:
    """One step's attention, called once a layer."""

    def __init__(
        self,
        heads: HeadLayout,
        batch: AttentionBatch,
        positions: Tensor,
        ropes: RopeTables,
        kv_cache: KVCache,
        dtype: torch.dtype,
    ) -> None:
        """Of projections of this type; the cache may have another."""
        self._heads = heads
        self._kv_cache = kv_cache
        self._rotations = [reference.rotary_rows(each, positions, dtype) for each in ropes.tables]
        self._rotation_of = ropes.of_layer
        kept = batch.slot_mapping >= 0
        self._kept = None if bool(kept.all()) else kept
        self._slots = batch.slot_mapping if self._kept is None else batch.slot_mapping[kept]
        self._scoring = reference.Scoring(heads.scale)
        self._plan = reference.AttentionPlan.build(
            batch.block_tables, batch.context_lens, batch.cu_seqlens_q, kv_cache.block_size, dtype
        )

    def __call__(self, qkv: Tensor, qk_norm: Tensor | None, eps: float, layer: int) -> Tensor:
        """Norms, rotates, stores and attends: [T, (H + 2 Hkv) D] -> [T, H D].

        qk_norm [H + Hkv, D] is the norm weight of each head of q and k, for models that have one.
        """
        heads = self._heads
        qkv = qkv.view(-1, heads.num_heads + 2 * heads.num_kv_heads, heads.head_dim)
        qk, v = qkv.tensor_split((heads.num_heads + heads.num_kv_heads,), dim=1)
        if qk_norm is not None:
            qk = reference.rms_norm(qk, qk_norm, eps)
        cos, sin = self._rotations[self._rotation_of[layer]]
        q, k = reference.rotate(qk, cos, sin).tensor_split((heads.num_heads,), dim=1)
        if self._kept is not None:
            k, v = k[self._kept], v[self._kept]
        kv_rows, scales = self._kv_cache.rows(layer), self._kv_cache.scales(layer)
        k_rows, v_rows = kv_rows.unbind(1)
        _, _, k_inverse, v_inverse = (None,) * 4 if scales is None else scales
        offsets = self._kv_cache.key_offsets(layer)
        k = k if offsets is None else k.float() - offsets
        reference.store(k, k_rows, self._slots, k_inverse)
        reference.store(v, v_rows, self._slots, v_inverse)
        return reference.attend(q, kv_rows, self._plan, self._scoring, scales).flatten(1)
