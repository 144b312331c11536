"""Our own kernels as an attention backend: Triton, and CUDA C over an FP8 cache."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.attention.decode_attention import attend_leading, paged_decode_attention
from kernels.attention.prefill_attention import attend_tiles, paged_attention
from kernels.attention.workspace import decode_workspace
from kernels.attention_kind import AttentionKind
from kernels.cluster import decode_float8, decode_float8_rows
from worker_svc.attention.batch import AttentionBatch, HeadLayout, MixedBatch
from worker_svc.attention.call import AttentionCall
from worker_svc.attention.layer_kv import LayerKv
from worker_svc.config import kernel_cache


@dataclass(frozen=True, slots=True)
class Rotary:
    """The norms and rotations of a layer's queries and keys."""

    positions: Tensor  # [T] int64
    cos_sin: Tensor  # [P, R], of the R first dimensions of a head
    qk_norms: tuple[Tensor, Tensor] | None  # [D] each, or of all heads
    eps: float


class TritonAttention:
    """Serves every type, block size and device that the worker does."""

    name = "triton"

    def __init__(self, heads: HeadLayout, like: Tensor) -> None:
        """`like` has the type and the device of what will be attended to."""
        query = torch.empty(
            (1, heads.num_heads, heads.head_dim), dtype=like.dtype, device=like.device
        )
        # Shared by every layer, step and graph: they run one after the other on one stream.
        self._workspace = decode_workspace(query, heads.num_kv_heads)

    def serves(self, kind: AttentionKind) -> bool:
        """See `Backend`."""
        return kind.chunk is None

    def decode(self, call: AttentionCall) -> Tensor:
        """See `Backend`."""
        q, kv, batch, kind = call.q, call.kv, call.batch, call.kind
        tables, lens = batch.block_tables, batch.context_lens
        if kv.scales is not None and kind.is_plain and decode_float8.pays(len(q), kv.k.shape[2]):
            kernel = decode_float8.kernel_for(q, kv.k, kernel_cache() / "cluster")
            if kernel is not None:
                return kernel.attend(q, kv.k, kv.v, tables, lens, kind.scale, kv.scales, call.out)
        return paged_decode_attention(
            q, kv.k, kv.v, tables, lens, kind, call.out, self._workspace, kv.scales, call.sinks
        )

    def from_projection(
        self, qkv: Tensor, rotary: Rotary, kv: LayerKv, kind: AttentionKind, batch: AttentionBatch
    ) -> Tensor | None:
        """Rotates, stores and attends [T, (H + 2 Hkv) D] -> [T, H, D] in one kernel.

        None if there is no such kernel for the layer's kind, its cache and these rows.
        """
        if kv.scales is None or not batch.is_decode or batch.mixed is not None:
            return None
        if not kind.is_plain or not decode_float8_rows.pays(len(qkv), kv.k.shape[2]):
            return None
        if rotary.cos_sin.shape[1] != kv.k.shape[3]:
            return None
        of_head = kv.k.shape[3:], qkv.dtype
        norms = rotary.qk_norms
        if norms is not None and (norms[0].shape, norms[0].dtype) != of_head:
            return None
        kernels = decode_float8_rows.kernels_for(
            qkv, kv.k, rotary.qk_norms is not None, len(rotary.cos_sin),
            kernel_cache() / "cluster",
        )  # fmt: skip
        if kernels is None:
            return None
        return kernels.attend(
            qkv, rotary.positions, batch.slot_mapping, rotary.cos_sin, rotary.qk_norms, rotary.eps,
            kv.k, kv.v, batch.block_tables, batch.context_lens, kind.scale, kv.scales,
            kv.key_offsets,
        )  # fmt: skip

    def prefill(self, call: AttentionCall) -> Tensor:
        """See `Backend`."""
        kv, batch = call.kv, call.batch
        return paged_attention(
            call.q, kv.k, kv.v, batch.block_tables, batch.context_lens, batch.cu_seqlens_q,
            batch.max_seqlen_q, call.kind, call.out, kv.scales, call.sinks,
        )  # fmt: skip

    def mixed(self, call: AttentionCall, mixed: MixedBatch) -> Tensor:
        """Decodes and prompts of a step whose shape the device knows; of padding anything."""
        q, kv, batch, kind = call.q, call.kv, call.batch, call.kind
        out = torch.empty_like(q)
        attend_leading(
            q, kv.k, kv.v, batch.block_tables, mixed.decode_lens, mixed.num_decodes, kind, out,
            self._workspace, kv.scales, call.sinks,
        )  # fmt: skip
        attend_tiles(
            q, kv.k, kv.v, batch.block_tables, batch.context_lens, batch.cu_seqlens_q,
            mixed.tiles, kind, out, kv.scales, call.sinks,
        )  # fmt: skip
        return out
