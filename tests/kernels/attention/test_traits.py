"""Windows, softcaps and sinks in the attention kernels against a dense softmax."""

import math
from itertools import accumulate

import pytest
import torch

from kernels.attention.decode_attention import attend_leading, paged_decode_attention
from kernels.attention.paged import Tiles
from kernels.attention.prefill_attention import attend_tiles, paged_attention, tokens_per_tile
from kernels.attention_kind import AttentionKind

HEADS, KV_HEADS, DIM, BLOCK = 6, 2, 32, 16
SCALE = 0.3
KINDS = {
    "a window of one key": {"window": 1},
    "a window within a block": {"window": 7},
    "a window over many tiles": {"window": 70},
    "a window longer than any context": {"window": 1000},
    "a softcap": {"softcap": 2.0},
    "sinks": {"has_sinks": True},
    "all of them": {"window": 33, "softcap": 3.0, "has_sinks": True},
}
CONTEXTS = [1, 6, 7, 8, 33, 34, 150, 0, 260]


@pytest.fixture(params=list(KINDS))
def traits(request, device):
    """The kind of layer, and its sinks."""
    kind = AttentionKind(SCALE, **KINDS[request.param])
    # One that takes nearly all, one that takes nothing, and some in between.
    sinks = torch.tensor([4.0, -30.0, 0.0, 1.5, -2.0, 30.0], device=device)
    return kind, sinks if kind.has_sinks else None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_one_query_of_each_sequence(traits, dtype, device, paged, assert_close):
    batch = paged(CONTEXTS, (KV_HEADS, DIM), BLOCK, dtype)
    q = torch.randn(len(CONTEXTS), HEADS, DIM, device=device).to(dtype)
    expected = batch.attention(q, list(range(len(CONTEXTS) + 1)), *traits)
    out = torch.full_like(q, math.nan)
    given = batch.block_tables, batch.context_lens
    paged_decode_attention(q, batch.k_cache, batch.v_cache, *given, traits[0], out, sinks=traits[1])
    assert_close(out, expected)


def test_leading_queries_whose_number_the_device_has(traits, device, paged, assert_close):
    contexts = [260, 150, 34, 7, 1]
    batch = paged(contexts, (KV_HEADS, DIM), BLOCK)
    q = torch.randn(5, HEADS, DIM, device=device)
    expected = batch.attention(q, list(range(6)), *traits)
    out = torch.full_like(q, math.nan)
    number = torch.tensor([4], dtype=torch.int32, device=device)
    given = batch.block_tables, batch.context_lens
    attend_leading(q, batch.k_cache, batch.v_cache, *given, number, traits[0], out, sinks=traits[1])
    assert_close(out[:4], expected[:4])
    assert out[4].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("has_tiles", [False, True])
def test_many_queries_of_each_sequence(traits, has_tiles, dtype, device, paged, assert_close):
    # The last one's queries see no key of the first tile.
    contexts, lens = [100, 160, 1, 70, 0, 8, 136], [100, 65, 1, 40, 1, 8, 8]
    batch = paged(contexts, (KV_HEADS, DIM), BLOCK, dtype)
    q = torch.randn(sum(lens), HEADS, DIM, device=device).to(dtype)
    starts = [0, *accumulate(lens)]
    expected = batch.attention(q, starts, *traits)
    cu = torch.tensor(starts, dtype=torch.int32, device=device)
    caches, given = (batch.k_cache, batch.v_cache), (batch.block_tables, batch.context_lens, cu)
    if not has_tiles:
        out = paged_attention(q, *caches, *given, max(lens), traits[0], sinks=traits[1])
    else:
        size = tokens_per_tile(max(lens), (HEADS, KV_HEADS), DIM, q.element_size())
        places = [(row, first) for row, n in enumerate(lens) for first in range(0, n, size)]
        rows, firsts = (
            torch.tensor(column, dtype=torch.int32, device=device)
            for column in zip(*places, strict=True)
        )
        out = torch.full_like(q, math.nan)
        tiles = Tiles(rows, firsts, max(lens))
        attend_tiles(q, *caches, *given, tiles, traits[0], out, sinks=traits[1])
    assert_close(out, expected)
