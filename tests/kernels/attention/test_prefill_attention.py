"""Prefill attention against a dense softmax over the same paged keys and values."""

import math
from itertools import accumulate

import pytest
import torch

from kernels.attention.paged import Tiles
from kernels.attention.prefill_attention import attend_tiles, paged_attention, tokens_per_tile
from kernels.attention_kind import AttentionKind
from tests.pairs import pairwise

BATCHES = {  # (context, queries) of each sequence
    "whole prompts": [(100, 100), (1, 1), (33, 33)],
    "chunks over a cached context": [(90, 17), (160, 64), (65, 2)],
    "decodes among chunks": [(77, 1), (70, 40), (16, 1), (129, 129)],
    "a few draft tokens": [(50, 4), (16, 3), (20, 1)],
    "padding and idle sequences": [(0, 1), (40, 0), (40, 8), (0, 0)],
}
DTYPES = [torch.float32, torch.float16]
SHAPES = [(6, 2, 64, 16), (4, 4, 128, 32), (9, 3, 64, 256)]  # H, Hkv, D, block size


def run(batch, q, lens, kind):
    cu = torch.tensor([0, *accumulate(lens)], dtype=torch.int32, device=q.device)
    out = torch.full_like(q, math.nan)
    tables, contexts = batch.block_tables, batch.context_lens
    return paged_attention(
        q, batch.k_cache, batch.v_cache, tables, contexts, cu, max(lens), kind, out
    )


@pytest.mark.parametrize(("name", "shape", "dtype"), pairwise(list(BATCHES), SHAPES, DTYPES))
def test_the_last_query_sees_the_last_key(name, shape, dtype, device, paged, assert_close):
    heads, kv_heads, dim, block_size = shape
    contexts, lens = map(list, zip(*BATCHES[name], strict=True))
    batch = paged(contexts, (kv_heads, dim), block_size, dtype)
    q = torch.randn(sum(lens), heads, dim, device=device).to(dtype)
    expected = batch.attention(q, [0, *accumulate(lens)], AttentionKind(0.2))
    assert_close(run(batch, q, lens, AttentionKind(0.2)), expected)


@pytest.mark.parametrize(("name", "longest", "dtype"), pairwise(list(BATCHES), [8, 200], DTYPES))
def test_tiles_in_any_order_give_the_rows_of_their_sequences_and_write_no_others(
    name, longest, dtype, device, paged, assert_close
):
    heads, kv_heads, dim = 6, 2, 64
    contexts, lens = map(list, zip(*BATCHES[name], strict=True))
    batch = paged(contexts, (kv_heads, dim), 16, dtype)
    q = torch.randn(sum(lens), heads, dim, device=device).to(dtype)
    starts = [0, *accumulate(lens)]
    size = tokens_per_tile(longest, (heads, kv_heads), dim, q.element_size())
    chosen = range(1, len(lens))  # the first sequence has no tiles
    tiles = [(row, first) for row in chosen for first in range(0, lens[row], size)]
    tiles = [*tiles[::-1], (-1, 0), (-1, 7)]
    rows, firsts = (
        torch.tensor(column, dtype=torch.int32, device=device)
        for column in zip(*tiles, strict=True)
    )
    cu = torch.tensor(starts, dtype=torch.int32, device=device)
    out = torch.full_like(q, math.nan)
    attend_tiles(
        q, batch.k_cache, batch.v_cache, batch.block_tables, batch.context_lens, cu,
        Tiles(rows, firsts, longest), AttentionKind(0.2), out,
    )  # fmt: skip
    assert out[: lens[0]].isnan().all()
    assert_close(out[lens[0] :], batch.attention(q, starts, AttentionKind(0.2))[lens[0] :])


def test_tiles_of_another_type_or_number_are_refused(device, paged):
    batch = paged([4], (2, 64))
    q = torch.randn(4, 4, 64, device=device)
    cu = torch.tensor([0, 4], dtype=torch.int32, device=device)
    given = (q, batch.k_cache, batch.v_cache, batch.block_tables, batch.context_lens, cu)
    with pytest.raises(TypeError, match="tiles must be int32"):
        attend_tiles(*given, Tiles(cu.long(), cu.long(), 4), AttentionKind(1.0), q)
    with pytest.raises(ValueError, match="tiles"):
        attend_tiles(*given, Tiles(cu, cu[:1], 4), AttentionKind(1.0), q)


def test_more_sequences_than_one_look_at_their_starts_finds(device, paged, assert_close):
    contexts = [5] * 260  # a look is at 256
    batch = paged(contexts, (1, 64), 16)
    lens = [1 + i % 3 for i in range(260)]
    q = torch.randn(sum(lens), 1, 64, device=device)
    assert_close(
        run(batch, q, lens, AttentionKind(0.2)),
        batch.attention(q, [0, *accumulate(lens)], AttentionKind(0.2)),
    )


def test_wrong_arguments_are_refused_by_name(device, paged):
    batch = paged([4], (2, 64))
    q = torch.randn(4, 4, 64, device=device)
    k, v, tables, lens = batch.k_cache, batch.v_cache, batch.block_tables, batch.context_lens
    cu = torch.tensor([0, 4], dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="3 query heads do not divide among 2"):
        paged_attention(q[:, :3], k, v, tables, lens, cu, 4, AttentionKind(1.0))
    with pytest.raises(TypeError, match="float16"):
        paged_attention(q.half(), k, v, tables, lens, cu, 4, AttentionKind(1.0))
    with pytest.raises(TypeError, match="cu_seqlens_q must be int32"):
        paged_attention(q, k, v, tables, lens, cu.long(), 4, AttentionKind(1.0))
    with pytest.raises(ValueError, match="cu_seqlens_q"):
        paged_attention(q, k, v, tables, lens, cu[:1], 4, AttentionKind(1.0))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "sequences",
    [[(4096, 4096)], [(512, 512)] * 16, [(3000, 700)] * 3 + [(900, 1)] * 60, [(800, 1)] * 64],
    ids=["prompt", "prompts", "mixed", "decodes"],
)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(16, 8, 128), (28, 4, 128), (32, 8, 64)])
def test_real_sizes_in_bfloat16(heads, kv_heads, dim, sequences, device, paged, assert_close):
    contexts, lens = map(list, zip(*sequences, strict=True))
    batch = paged(contexts, (kv_heads, dim), 16, torch.bfloat16)
    q = torch.randn(sum(lens), heads, dim, device=device).bfloat16()
    expected = batch.attention(q, [0, *accumulate(lens)], AttentionKind(dim**-0.5))
    assert_close(run(batch, q, lens, AttentionKind(dim**-0.5)), expected)


@pytest.mark.gpu
def test_offsets_beyond_32_bits_are_reached(device, paged, assert_close):
    small = paged([70], (8, 128), 16, torch.bfloat16)
    num_blocks = 2**31 // (16 * 8 * 128) + 8
    k, v = (
        torch.empty(num_blocks, 16, 8, 128, device=device, dtype=torch.bfloat16) for _ in range(2)
    )
    far = num_blocks - len(small.k_cache)
    k[far:], v[far:] = small.k_cache, small.v_cache
    tables = small.block_tables + far
    q = torch.randn(70, 16, 128, device=device).bfloat16()
    cu = torch.tensor([0, 70], dtype=torch.int32, device=device)
    out = paged_attention(q, k, v, tables, small.context_lens, cu, 70, AttentionKind(0.1))
    assert_close(out, small.attention(q, [0, 70], AttentionKind(0.1)))
