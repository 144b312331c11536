"""Compiles what attention and routers of families without a GPU run launch, for sm_90.

The sizes are those of GLM-4.5 (heads that are rotated in part), MiniMax-M2 (norms of all heads),
DeepSeek V3 (groups of experts, latents of 128 heads), GLM-4.7-Flash (latents of 20) and Qwen3-Next
(gates).
"""

import torch

from kernels.attention.gate import gated
from kernels.attention.latent_attention import latent_attention, latent_decode_attention
from kernels.attention.latent_rope import rotate_write_latents
from kernels.attention.rope import norm_rope_write_kv
from kernels.attention_kind import AttentionKind
from kernels.experts.router import Router, route
from tests.kernels.compiling import empty, floats, report

LATENT, TURNED = 512, 64
KIND = AttentionKind(0.07)


def indices(*shape: int) -> torch.Tensor:
    return empty(*shape, dtype=torch.int64)


def lengths(*shape: int) -> torch.Tensor:
    return empty(*shape, dtype=torch.int32)


def launch() -> None:
    heads, kv_heads, dim = 48, 8, 128
    cache, tokens = empty(20, 16, 2, kv_heads, dim).unbind(2), indices(8)
    qkv, table = empty(8, (heads + 2 * kv_heads) * dim), floats(500, dim // 2)
    norms = (empty(dim), empty(dim)), (empty(heads * dim), empty(kv_heads * dim))
    for q_norm, k_norm in norms:
        norm_rope_write_kv(qkv, tokens, table, *cache, tokens, q_norm, k_norm, 1e-6, qkv)
    router = Router(
        empty(256, 7168), 8, True, floats(256), True, 2.5, 1, num_groups=8, kept_groups=4
    )
    route(empty(2, 7168), router, empty(7168), 1e-6)
    gated(empty(8, 4096), empty(8, 9216)[:, 5120:])
    over_latents(20, 192, num_rows=None)
    over_latents(128, 128, num_rows=lengths(1))
    starts, rows = lengths(3), empty(20, 16, 1, LATENT + TURNED)
    q = empty(300, 128, LATENT + TURNED)
    latent_attention(q, rows, LATENT, lengths(2, 8), lengths(2), starts, 300, KIND)


def over_latents(heads: int, nope: int, num_rows: torch.Tensor | None) -> None:
    """A decode of 16 rows."""
    width, tokens = LATENT + TURNED, indices(16)
    cache = empty(20, 16, 1, width)
    projected = empty(16, heads, nope + TURNED), empty(16, width)
    q = rotate_write_latents(
        *projected, tokens, floats(500, TURNED), empty(LATENT), 1e-6, cache, tokens,
        is_interleaved=True,
    )  # fmt: skip
    tables = lengths(16, 8), lengths(16)
    latent_decode_attention(q, cache, LATENT, *tables, KIND, num_rows=num_rows)


if __name__ == "__main__":
    report(launch)
