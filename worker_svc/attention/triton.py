"""Our own kernels as an attention backend: Triton, and CUDA C over an FP8 cache."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.attention.decode_attention import attend_leading, paged_decode_attention
from kernels.attention.paged import PLAIN, Traits
from kernels.attention.prefill_attention import attend_tiles, paged_attention
from kernels.attention.workspace import DecodeWorkspace, decode_workspace
from kernels.cluster import decode_float8, decode_float8_rows
from worker_svc.attention.batch import AttentionBatch, HeadLayout, MixedBatch
from worker_svc.attention.kv_cache import KVCache
from worker_svc.config import kernel_cache


@dataclass(frozen=True, slots=True)
class Rotary:
    """How a layer norms and rotates queries and keys."""

    positions: Tensor  # [T] int64
    cos_sin: Tensor  # [P, D]
    qk_norms: tuple[Tensor, Tensor] | None  # [D] each
    eps: float


class TritonAttention:
    """Serves every type, block size and device that the worker does."""

    name = "triton"

    def __init__(
        self,
        heads: HeadLayout,
        like: Tensor,
        scale: float | None = None,
        traits: Traits = PLAIN,
        workspace: DecodeWorkspace | None = None,
    ) -> None:
        """`like` has the type and the device of what will be attended to.

        `scale` is that of the scores, by default that of the heads. Layers may share a workspace.
        """
        self._scale = heads.scale if scale is None else scale
        self._traits = traits
        query = torch.empty(
            (1, heads.num_heads, heads.head_dim), dtype=like.dtype, device=like.device
        )
        # Shared by every step and every graph: steps run one after the other on one stream.
        self.workspace = workspace or decode_workspace(query, heads.num_kv_heads)

    def decode(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: AttentionBatch,
        out: Tensor | None = None,
        kv_scales: Tensor | None = None,
    ) -> Tensor:
        """See `Backend`."""
        if kv_scales is not None and decode_float8.pays(len(q), k_cache.shape[2]):
            kernel = decode_float8.kernel_for(q, k_cache, kernel_cache() / "cluster")
            if kernel is not None:
                tables, lens = batch.block_tables, batch.context_lens
                return kernel.attend(q, k_cache, v_cache, tables, lens, self._scale, kv_scales, out)
        return paged_decode_attention(
            q, k_cache, v_cache, batch.block_tables, batch.context_lens, self._scale, out,
            self.workspace, kv_scales, self._traits,
        )  # fmt: skip

    def from_projection(
        self, qkv: Tensor, rotary: Rotary, kv_cache: KVCache, index: int, batch: AttentionBatch
    ) -> Tensor | None:
        """Rotates, stores and attends [T, (H + 2 Hkv) D] -> [T, H, D] in one kernel.

        None if there is no such kernel for the layer's cache and these rows.
        """
        kv_scales, (k_cache, v_cache) = kv_cache.scales(index), kv_cache.layer(index)
        if kv_scales is None or not batch.is_decode or batch.mixed is not None:
            return None
        if not decode_float8_rows.pays(len(qkv), k_cache.shape[2]):
            return None
        kernels = decode_float8_rows.kernels_for(
            qkv, k_cache, rotary.qk_norms is not None, len(rotary.cos_sin),
            kernel_cache() / "cluster",
        )  # fmt: skip
        if kernels is None:
            return None
        return kernels.attend(
            qkv, rotary.positions, batch.slot_mapping, rotary.cos_sin, rotary.qk_norms, rotary.eps,
            k_cache, v_cache, batch.block_tables, batch.context_lens, self._scale, kv_scales,
            kv_cache.key_offsets(index),
        )  # fmt: skip

    def prefill(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: AttentionBatch,
        out: Tensor | None = None,
        kv_scales: Tensor | None = None,
    ) -> Tensor:
        """See `Backend`."""
        return paged_attention(
            q, k_cache, v_cache, batch.block_tables, batch.context_lens, batch.cu_seqlens_q,
            batch.max_seqlen_q, self._scale, out, kv_scales, self._traits,
        )  # fmt: skip

    def mixed(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: AttentionBatch,
        mixed: MixedBatch,
        kv_scales: Tensor | None = None,
    ) -> Tensor:
        """Decodes and prompts of a step whose shape the device knows; of padding anything."""
        out = torch.empty_like(q)
        attend_leading(
            q, k_cache, v_cache, batch.block_tables, mixed.decode_lens, mixed.num_decodes,
            self._scale, out, self.workspace, kv_scales, self._traits,
        )  # fmt: skip
        attend_tiles(
            q, k_cache, v_cache, batch.block_tables, batch.context_lens, batch.cu_seqlens_q,
            mixed.tiles, self._scale, out, kv_scales, self._traits,
        )  # fmt: skip
        return out

    def step(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: AttentionBatch) -> Tensor:
        """Any step of a cache in the type of the model: [T, H, D] -> [T, H, D]."""
        if batch.mixed is not None:
            return self.mixed(q, k_cache, v_cache, batch, batch.mixed)
        if batch.parts is None:
            attend = self.decode if batch.is_decode else self.prefill
            return attend(q, k_cache, v_cache, batch)
        out = torch.empty_like(q)
        decodes, prompts = batch.parts
        n = len(decodes.context_lens)
        self.decode(q[:n], k_cache, v_cache, decodes, out[:n])
        self.prefill(q[n:], k_cache, v_cache, prompts, out[n:])
        return out
