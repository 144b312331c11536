"""Triton kernels over caches in FP8: what is stored, bit by bit, and what is attended to."""

import math
from itertools import accumulate

import pytest
import torch

from kernels import fp8
from kernels.attention.decode_attention import attend_leading, paged_decode_attention
from kernels.attention.paged import Tiles
from kernels.attention.prefill_attention import attend_tiles, paged_attention, tokens_per_tile
from kernels.attention.rope import norm_rope_write_kv
from kernels.attention.workspace import decode_workspace
from kernels.attention_kind import AttentionKind
from tests.pairs import pairwise

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SHAPES = [(6, 2, 64, 16), (4, 4, 128, 32)]  # H, Hkv, D, block size
MIXED = [(77, 1), (50, 20), (33, 33), (0, 1)]  # (context, queries)

kinds = pytest.mark.parametrize("kv_dtype", [E4M3, E5M2])


def table_of(kv_heads, device):
    k, v = torch.rand((2, kv_heads), generator=torch.Generator().manual_seed(kv_heads)) * 2 + 0.01
    return fp8.scale_table(k, v).to(device)


def narrow(batch, kv_dtype):
    """The batch's caches in FP8 with their scales; the batch keeps what they count as."""
    scales = table_of(batch.k_cache.shape[2], batch.k_cache.device)
    caches = []
    for cache, side in ((batch.k_cache, 0), (batch.v_cache, 1)):
        stored = fp8.narrowed(cache, scales[2 + side], kv_dtype)
        # Not contiguous, as in the worker, whose keys and values are interleaved.
        both = torch.stack((stored.view(torch.uint8),) * 2, dim=2).view(kv_dtype)
        caches.append(both[:, :, side])
        cache.copy_(fp8.widened(stored, scales[side], cache.dtype))
    return *caches, scales


@pytest.mark.parametrize(
    ("shape", "dtype", "kv_dtype"), pairwise(SHAPES, [torch.float32, torch.float16], [E4M3, E5M2])
)
def test_a_decode_attends_to_what_is_stored(shape, dtype, kv_dtype, device, paged, assert_close):
    heads, kv_heads, dim, block_size = shape
    contexts = [0, 1, block_size + 1, 144]
    batch = paged(contexts, (kv_heads, dim), block_size)
    k, v, scales = narrow(batch, kv_dtype)
    q = torch.randn(len(contexts), heads, dim, device=device).to(dtype)
    tables, lens = batch.block_tables, batch.context_lens
    out = paged_decode_attention(q, k, v, tables, lens, AttentionKind(0.2), kv_scales=scales)
    assert_close(out, batch.attention(q, list(range(len(contexts) + 1)), AttentionKind(0.2)))


@kinds
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "block_size"), SHAPES)
def test_prompts_chunks_and_decodes_attend_to_what_is_stored(
    heads, kv_heads, dim, block_size, kv_dtype, device, paged, assert_close
):
    contexts, lens = map(list, zip(*MIXED, strict=True))
    batch = paged(contexts, (kv_heads, dim), block_size)
    k, v, scales = narrow(batch, kv_dtype)
    starts = [0, *accumulate(lens)]
    cu = torch.tensor(starts, dtype=torch.int32, device=device)
    q = torch.randn(sum(lens), heads, dim, device=device)
    tables, contexts = batch.block_tables, batch.context_lens
    out = paged_attention(
        q, k, v, tables, contexts, cu, max(lens), AttentionKind(0.2), kv_scales=scales
    )
    assert_close(out, batch.attention(q, starts, AttentionKind(0.2)))


@pytest.mark.usefixtures("few_programs")
@kinds
def test_a_step_whose_shape_the_device_knows(kv_dtype, device, paged, assert_close):
    """Leading decodes by one call, tiles of the others by another, as in a captured graph."""
    heads, kv_heads, dim = 6, 2, 64
    contexts, lens = [77, 16, 130, 50, 33], [1, 1, 1, 20, 33]
    batch = paged(contexts, (kv_heads, dim))
    k, v, scales = narrow(batch, kv_dtype)
    q = torch.randn(sum(lens), heads, dim, device=device)
    starts = [0, *accumulate(lens)]
    size = tokens_per_tile(33, (heads, kv_heads), dim, 4)
    tiles = [(row, first) for row in (3, 4) for first in range(0, lens[row], size)]
    rows, firsts = torch.tensor([*tiles, (-1, 0)], dtype=torch.int32, device=device).T.contiguous()
    out = torch.full_like(q, math.nan)
    count = torch.tensor([3], dtype=torch.int32, device=device)
    decode_lens = batch.context_lens.where(torch.arange(5, device=device) < 3, -1)
    attend_leading(
        q, k, v, batch.block_tables, decode_lens, count, AttentionKind(0.2), out,
        decode_workspace(q, kv_heads), kv_scales=scales,
    )  # fmt: skip
    attend_tiles(
        q, k, v, batch.block_tables, batch.context_lens,
        torch.tensor(starts, dtype=torch.int32, device=device), Tiles(rows, firsts, 33),
        AttentionKind(0.2), out, kv_scales=scales,
    )  # fmt: skip
    assert_close(out, batch.attention(q, starts, AttentionKind(0.2)))


def write(
    qkv, kv_dtype, kv_heads, dim, slots, scales, weights=(None, None), offsets=None, rotated=None
):
    """(q, k_cache, v_cache) of a cache of 4 blocks with this type."""
    cache = torch.zeros(4, 16, 2, kv_heads, dim, dtype=torch.uint8, device=qkv.device)
    cache = cache.view(kv_dtype) if kv_dtype in fp8.LARGEST else cache.to(kv_dtype)
    k_cache, v_cache = cache.unbind(2)
    positions = torch.arange(len(qkv), device=qkv.device)
    angles = torch.arange(99)[:, None] * torch.linspace(0, 1, (rotated or dim) // 2)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1).to(qkv.device)
    q = norm_rope_write_kv(
        qkv, positions, cos_sin, k_cache, v_cache, slots, *weights, eps=1e-6, kv_scales=scales,
        key_offsets=offsets,
    )  # fmt: skip
    return q, k_cache, v_cache


@pytest.mark.parametrize(
    ("tokens", "dtype", "kv_dtype"), pairwise([3, 70], [torch.float32, torch.float16], [E4M3, E5M2])
)
def test_what_is_stored_is_the_fp8_of_what_would_be(tokens, dtype, kv_dtype, device):
    kv_heads, dim = 3, 64
    qkv = torch.randn(tokens, (6 + 2 * kv_heads) * dim, device=device).mul(20).to(dtype)
    slots = torch.randperm(64, device=device).repeat(2)[:tokens]
    slots[64:] = -1
    slots[1] = -1
    weights = [torch.randn(dim, device=device).to(dtype) for _ in range(2)]
    scales = table_of(kv_heads, device)
    offsets = torch.randn(kv_heads, dim, device=device) * 5
    rotated = dim if tokens == 3 else 40
    q, *caches = write(qkv, kv_dtype, kv_heads, dim, slots, scales, weights, offsets, rotated)
    plain_q, *plain = write(qkv, dtype, kv_heads, dim, slots, None, weights, rotated=rotated)
    if device.type == "cuda":  # two kernels, of which one may round product and sum at once
        torch.testing.assert_close(q, plain_q)
    else:
        assert torch.equal(q, plain_q)
    for side, (stored, exact) in enumerate(zip(caches, plain, strict=True)):
        if side == 0:  # slots that nothing was written to hold 0
            written = exact.new_zeros(exact.shape[:2], dtype=torch.bool)
            written.view(-1)[slots[slots >= 0]] = True
            exact = torch.where(written[..., None, None], exact.float() - offsets, 0.0)
        wanted = fp8.narrowed(exact, scales[2 + side], kv_dtype)
        differs = stored.view(torch.uint8) != wanted.view(torch.uint8)
        assert differs.float().mean() <= (1e-3 if device.type == "cuda" else 0.0)


@kinds
def test_every_value_is_stored_as_the_reference_stores_it(kv_dtype, device):
    """Powers, ties, neighbours, infinities and NaN, as values, which nothing rotates."""
    exponents = torch.arange(-40, 40).float()
    digits = torch.tensor([1.0, 1.0625, 1.125, 1.1875, 1.25, 1.375, 1.5, 1.75, 1.9375, 1.99])
    values = (torch.exp2(exponents)[:, None] * digits).flatten()
    values = torch.cat((values, -values, torch.tensor([0.0, math.inf, -math.inf, math.nan])))
    values = torch.nn.functional.pad(values, (0, -len(values) % 64)).view(-1, 64).to(device)
    qkv = torch.cat((torch.zeros(len(values), 128, device=device), values), dim=1)
    scales = table_of(1, device)
    slots = torch.arange(len(values), device=device)
    _, _, v_cache = write(qkv, kv_dtype, 1, 64, slots, scales)
    found = v_cache.flatten(0, 1)[: len(values), 0].contiguous().view(torch.uint8)
    wanted = fp8.narrowed(values[:, None], scales[3], kv_dtype)[:, 0].view(torch.uint8)
    is_finite = values.isfinite()
    assert torch.equal(found[is_finite], wanted[is_finite])
    assert found[~is_finite].bitwise_and(0x7F).eq(0x7F).all()  # NaN of both types


def test_a_cache_without_its_scales_is_refused(device, paged):
    batch = paged([4], (2, 64))
    k, v, scales = narrow(batch, E4M3)
    q = torch.randn(1, 4, 64, device=device)
    tables, lens = batch.block_tables, batch.context_lens
    with pytest.raises(TypeError, match="float8_e4m3fn"):
        paged_decode_attention(q, k, v, tables, lens, AttentionKind(1.0))
    with pytest.raises(ValueError, match=r"scales must be contiguous float32 \[4, 2\]"):
        paged_decode_attention(q, k, v, tables, lens, AttentionKind(1.0), kv_scales=scales[:2])
    with pytest.raises(TypeError, match="float32 has scales"):
        paged_decode_attention(
            q, batch.k_cache, batch.v_cache, tables, lens, AttentionKind(1.0), kv_scales=scales
        )
