"""Windows, softcaps and sinks in the attention kernels against a dense softmax."""

import math
from dataclasses import replace
from itertools import accumulate

import pytest
import torch

from kernels.attention.decode_attention import attend_leading, paged_decode_attention
from kernels.attention.paged import Tiles
from kernels.attention.prefill_attention import attend_tiles, paged_attention, tokens_per_tile
from kernels.attention_kind import AttentionKind
from kernels.reference import AttentionPlan, KvRows, attend
from tests.pairs import pairwise

HEADS, KV_HEADS, DIM, BLOCK = 6, 2, 32, 16
SCALE = 0.3
KINDS = {
    "a window of one key": {"window": 1},
    "a window within a block": {"window": 7},
    "a window of a block": {"window": BLOCK},
    "a window of a block and a key": {"window": BLOCK + 1},
    "a window over many tiles": {"window": 70},
    "a window longer than any context": {"window": 1000},
    "a softcap": {"softcap": 2.0},
    "sinks": {"has_sinks": True},
    "all of them": {"window": 33, "softcap": 3.0, "has_sinks": True},
}
# Contexts at both edges of windows and blocks, none, and a long one.
CONTEXTS = [1, 6, 7, 8, 33, 34, 150, 0, 260]


DTYPES = [torch.float32, torch.float16]


def traits_of(name, device):
    """The kind of layer, and its sinks."""
    kind = AttentionKind(SCALE, **KINDS[name])
    # One that takes nearly all, one that takes nothing, and some in between.
    sinks = torch.tensor([4.0, -30.0, 0.0, 1.5, -2.0, 30.0], device=device)
    return kind, sinks if kind.has_sinks else None


def without_blocks_before(batch, window, lens):
    """The sequences with the null block, which is NaN, wherever no query's window reaches.

    Blocks before a window are not read: they may be another sequence's.
    """
    if window is None:
        return batch
    tables = batch.block_tables.clone()
    for row, (context, length) in enumerate(zip(batch.context_lens.tolist(), lens, strict=True)):
        tables[row, : max(0, context - length - window + 1) // BLOCK] = 0
    is_longer = window >= int(batch.context_lens.max())
    assert torch.equal(tables, batch.block_tables) == is_longer
    return replace(batch, block_tables=tables)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", KINDS)
def test_one_query_of_each_sequence(name, dtype, device, paged, assert_close):
    batch = paged(CONTEXTS, (KV_HEADS, DIM), BLOCK, dtype)
    kind, sinks = traits_of(name, device)
    q = torch.randn(len(CONTEXTS), HEADS, DIM, device=device).to(dtype)
    expected = batch.attention(q, list(range(len(CONTEXTS) + 1)), kind, sinks)
    batch = without_blocks_before(batch, kind.window, [1] * len(CONTEXTS))
    out = torch.full_like(q, math.nan)
    given = batch.block_tables, batch.context_lens
    paged_decode_attention(q, batch.k_cache, batch.v_cache, *given, kind, out, sinks=sinks)
    assert_close(out, expected)


@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize("name", KINDS)
def test_leading_queries_whose_number_the_device_has(name, device, paged, assert_close):
    contexts = [260, 150, 34, 7, 1]
    batch = paged(contexts, (KV_HEADS, DIM), BLOCK)
    kind, sinks = traits_of(name, device)
    q = torch.randn(5, HEADS, DIM, device=device)
    expected = batch.attention(q, list(range(6)), kind, sinks)
    out = torch.full_like(q, math.nan)
    number = torch.tensor([4], dtype=torch.int32, device=device)
    given = batch.block_tables, batch.context_lens
    attend_leading(q, batch.k_cache, batch.v_cache, *given, number, kind, out, sinks=sinks)
    assert_close(out[:4], expected[:4])
    assert out[4].isnan().all()


# Of many queries: the last sequence's see no key of the first tile.
MANY, LENS = [100, 160, 1, 70, 0, 8, 136], [100, 65, 1, 40, 1, 8, 8]


@pytest.mark.parametrize(
    ("name", "has_tiles", "dtype"), pairwise(list(KINDS), [False, True], DTYPES)
)
def test_many_queries_of_each_sequence(name, has_tiles, dtype, device, paged, assert_close):
    batch = paged(MANY, (KV_HEADS, DIM), BLOCK, dtype)
    traits = traits_of(name, device)
    q = torch.randn(sum(LENS), HEADS, DIM, device=device).to(dtype)
    expected = batch.attention(q, [0, *accumulate(LENS)], *traits)
    freed = without_blocks_before(batch, traits[0].window, LENS)
    assert_close(attend_many(freed, q, traits, has_tiles), expected)


def attend_many(batch, q, traits, has_tiles):
    cu = torch.tensor([0, *accumulate(LENS)], dtype=torch.int32, device=q.device)
    caches, given = (batch.k_cache, batch.v_cache), (batch.block_tables, batch.context_lens, cu)
    if not has_tiles:
        return paged_attention(q, *caches, *given, max(LENS), traits[0], sinks=traits[1])
    size = tokens_per_tile(max(LENS), (HEADS, KV_HEADS), DIM, q.element_size())
    places = [(row, first) for row, n in enumerate(LENS) for first in range(0, n, size)]
    rows, firsts = (
        torch.tensor(column, dtype=torch.int32, device=q.device)
        for column in zip(*places, strict=True)
    )
    out = torch.full_like(q, math.nan)
    tiles = Tiles(rows, firsts, max(LENS))
    attend_tiles(q, *caches, *given, tiles, traits[0], out, sinks=traits[1])
    return out


@pytest.mark.parametrize("window", [2, 7, 16, 17, 33, 70])
@pytest.mark.parametrize("lens", [[1] * len(MANY), LENS], ids=["one query", "many"])
def test_the_reference_reads_no_block_before_a_window(window, lens, device, paged):
    batch = paged(MANY, (KV_HEADS, DIM), BLOCK)
    q = torch.randn(sum(lens), HEADS, DIM, device=device)
    cu = torch.tensor([0, *accumulate(lens)], dtype=torch.int32, device=device)
    rows = KvRows(batch.k_cache.flatten(0, 1), batch.v_cache.flatten(0, 1))
    found = []
    for one in (batch, without_blocks_before(batch, window, lens)):
        kind = AttentionKind(SCALE, window)
        plan = AttentionPlan.build(one.block_tables, one.context_lens, cu, BLOCK, q.dtype, kind)
        found.append(attend(q, rows, plan, kind))
    assert found[0].isfinite().all()
    assert torch.equal(*found)
