"""Offsets of the keys of an FP8 KV cache, measured once on a fixed row of tokens.

A model's keys have parts that hardly change from token to token, and rounding to FP8 is relative to
the number stored. The offset of a head and channel lies half way between the key of the first
token, to which most attention goes, and the mean of the others. Tokens are drawn by a fixed rule,
computed alone, before anything is tuned, and the result is rounded to four bits: starts on equal
hardware and software with as many ranks give equal offsets, and most of them are equal elsewhere,
too. Blocks of two workers are never mixed, so only the last bits of what a worker computes depend
on it.
"""

import logging

import torch
from torch import Tensor

from kernels import fp8
from worker_svc.attention.batch import AttentionBatch
from worker_svc.models import Decoder

log = logging.getLogger(__name__)

MAX_TOKENS = 128
BLOCK_SIZE = 16


def set_offsets(decoder: Decoder, max_model_len: int) -> None:
    """Measures and sets those of a decoder whose cache is in FP8 with scales of 1.

    Scales of a checkpoint were made for whole keys, so these stay whole. Every rank must call it.
    """
    if not fp8.is_fp8(decoder.kv_dtype) or not _is_unscaled(decoder):
        return
    decoder.key_offsets = None  # of an earlier runner: keys are measured whole
    decoder.key_offsets = measured(decoder, min(MAX_TOKENS, max_model_len))
    log.info("keys of the FP8 KV cache are stored less offsets")


@torch.inference_mode()
def measured(decoder: Decoder, num_tokens: int) -> Tensor:
    """Offsets of this rank's heads, [L, Hkv, D] float32; 0 where a key is not finite."""
    device = decoder.device
    cache = decoder.new_cache(1 + -(-num_tokens // BLOCK_SIZE), BLOCK_SIZE)
    positions = torch.arange(num_tokens, device=device)
    length = torch.tensor([num_tokens], dtype=torch.int32, device=device)
    batch = AttentionBatch(
        slot_mapping=positions + BLOCK_SIZE,
        block_tables=torch.arange(1, cache.num_blocks, dtype=torch.int32, device=device)[None],
        context_lens=length,
        cu_seqlens_q=torch.tensor([0, num_tokens], dtype=torch.int32, device=device),
        max_seqlen_q=num_tokens,
        max_context_len=num_tokens,
    )
    vocab_size = decoder.sharding.whole.vocab_size
    token_ids = torch.tensor(tokens(num_tokens, vocab_size), device=device)
    decoder.forward(token_ids, positions, cache, batch)
    layers = [_keys(cache.of_layer(i).k, num_tokens) for i in range(decoder.spec.num_layers)]
    return torch.stack([between(keys) for keys in layers]).contiguous()


def tokens(count: int, vocab_size: int) -> list[int]:
    """Ids that are spread over a vocabulary, the same ones at every call."""
    state, ids = 12345, []
    for _ in range(count):
        state = (state * 1103515245 + 12345) % 2**31
        ids.append((state >> 8) % vocab_size)
    return ids


def between(keys: Tensor) -> Tensor:
    """Half way from the first of these keys [T, Hkv, D] to the mean of the others, in four bits."""
    others = keys[1:] if len(keys) > 1 else keys
    fraction, exponent = torch.frexp((keys[0] + others.mean(0)) / 2)
    offsets = torch.ldexp((fraction * 16).round() / 16, exponent)
    return offsets.where(offsets.isfinite(), 0.0)


def _keys(k_cache: Tensor, num_tokens: int) -> Tensor:
    """Keys of the cache's first sequence, [T, Hkv, D] float32."""
    return k_cache[1:].float().flatten(0, 1)[:num_tokens]


def _is_unscaled(decoder: Decoder) -> bool:
    return decoder.kv_scales is None or bool((decoder.kv_scales == 1).all())
