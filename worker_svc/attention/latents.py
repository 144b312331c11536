"""Our own kernels over a cache of latents, as an attention backend: Triton."""

from torch import Tensor

from kernels.attention.latent_attention import (
    attend_latent_tiles,
    latent_attention,
    latent_decode_attention,
)
from kernels.attention_kind import AttentionKind
from worker_svc.attention.batch import MixedBatch
from worker_svc.attention.call import AttentionCall


class TritonLatents:
    """Serves queries [T, H, R + P] of any number of heads, over rows that all heads have."""

    name = "triton over latents"

    def serves(self, kind: AttentionKind) -> bool:
        """See `Backend`."""
        return kind.is_plain

    def decode(self, call: AttentionCall) -> Tensor:
        """See `Backend`."""
        batch, kv = call.batch, call.kv
        return latent_decode_attention(
            call.q, kv.k, kv.v.shape[3], batch.block_tables, batch.context_lens, call.kind, call.out
        )

    def prefill(self, call: AttentionCall) -> Tensor:
        """See `Backend`."""
        batch, kv = call.batch, call.kv
        return latent_attention(
            call.q, kv.k, kv.v.shape[3], batch.block_tables, batch.context_lens,
            batch.cu_seqlens_q, batch.max_seqlen_q, call.kind, call.out,
        )  # fmt: skip

    def mixed(self, call: AttentionCall, mixed: MixedBatch) -> Tensor:
        """See `GraphBackend`."""
        q, kv, batch, kind = call.q, call.kv, call.batch, call.kind
        out = call.result()
        v_dim = out.shape[2]
        latent_decode_attention(
            q, kv.k, v_dim, batch.block_tables, mixed.decode_lens, kind, out, mixed.num_decodes
        )
        attend_latent_tiles(
            q, kv.k, v_dim, batch.block_tables, batch.context_lens, batch.cu_seqlens_q,
            mixed.tiles, kind, out,
        )  # fmt: skip
        return out
