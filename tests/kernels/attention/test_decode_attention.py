"""Decode attention against a dense softmax over the same paged keys and values."""

import math

import pytest
import torch

from kernels.attention.decode_attention import attend_leading, paged_decode_attention
from kernels.attention.workspace import decode_workspace
from kernels.attention_kind import AttentionKind
from tests.pairs import pairwise

SHAPES = [  # query heads, KV heads, head size, block size, contexts
    (6, 2, 64, 16, [0, 1, 15, 16, 17, 144]),
    (4, 4, 128, 32, [100, 0, 33]),
    (9, 3, 64, 256, [5, 256, 257]),
    (7, 1, 64, 16, [130]),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "block_size", "contexts"), SHAPES)
def test_each_row_attends_to_exactly_its_context(
    heads, kv_heads, dim, block_size, contexts, dtype, device, paged, assert_close
):
    batch = paged(contexts, (kv_heads, dim), block_size, dtype)
    q = torch.randn(len(contexts), heads, dim, device=device).to(dtype)
    out = torch.full_like(q, math.nan)
    returned = paged_decode_attention(
        q,
        batch.k_cache,
        batch.v_cache,
        batch.block_tables,
        batch.context_lens,
        AttentionKind(0.2),
        out,
    )
    assert returned is out
    assert_close(out, batch.attention(q, list(range(len(contexts) + 1)), AttentionKind(0.2)))


@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize(
    ("heads", "num_rows", "dtype"),
    pairwise([(6, 2, 64), (4, 4, 128), (9, 3, 64)], [0, 1, 3, 5], [torch.float32, torch.float16]),
)
def test_as_many_leading_rows_attend_as_the_device_says(
    heads, num_rows, dtype, device, paged, assert_close
):
    heads, kv_heads, dim = heads
    contexts = [144, 17, 1, 700, 64]
    batch = paged(contexts, (kv_heads, dim), 16, dtype)
    q = torch.randn(9, heads, dim, device=device).to(dtype)
    lens = batch.context_lens.clone()
    lens[num_rows:] = -1
    count = torch.tensor([num_rows], dtype=torch.int32, device=device)
    workspace = decode_workspace(q, kv_heads)
    out = torch.full_like(q, math.nan)
    for _ in range(2):  # the workspace is as it was
        attend_leading(
            q,
            batch.k_cache,
            batch.v_cache,
            batch.block_tables,
            lens,
            count,
            AttentionKind(0.2),
            out,
            workspace,
        )
        assert out[num_rows:].isnan().all()
        expected = batch.attention(q[:5], list(range(6)), AttentionKind(0.2))[:num_rows]
        assert_close(out[:num_rows], expected)
        assert not workspace.arrivals.any()


def test_a_workspace_serves_one_batch_after_another(device, paged, assert_close):
    q = torch.randn(3, 4, 64, device=device)
    workspace = decode_workspace(q, 2)
    for contexts in ([300, 2, 65], [1, 0, 290], [64, 64, 64]):
        batch = paged(contexts, (2, 64))
        tables, lens = batch.block_tables, batch.context_lens
        out = paged_decode_attention(
            q, batch.k_cache, batch.v_cache, tables, lens, AttentionKind(0.125), workspace=workspace
        )
        assert_close(out, batch.attention(q, [0, 1, 2, 3], AttentionKind(0.125)))
        assert not workspace.arrivals.any()


def test_queries_may_be_a_slice_of_the_fused_projection(device, paged, assert_close):
    batch = paged([20, 40], (2, 64))
    qkv = torch.randn(2, (4 + 2 * 2) * 64, device=device)
    q = qkv[:, : 4 * 64].view(2, 4, 64)
    tables, lens = batch.block_tables, batch.context_lens
    out = paged_decode_attention(
        q, batch.k_cache, batch.v_cache, tables, lens, AttentionKind(0.125)
    )
    assert_close(out, batch.attention(q, [0, 1, 2], AttentionKind(0.125)))


def test_an_empty_batch_gives_an_empty_result(device, paged):
    batch = paged([4], (2, 64))
    q = torch.empty(0, 4, 64, device=device)
    tables, lens = batch.block_tables[:0], batch.context_lens[:0]
    out = paged_decode_attention(q, batch.k_cache, batch.v_cache, tables, lens, AttentionKind(1.0))
    assert out.shape == (0, 4, 64)


def test_wrong_arguments_are_refused_by_name(device, paged):
    batch = paged([4], (2, 64))
    q = torch.randn(1, 4, 64, device=device)
    k, v, tables, lens = batch.k_cache, batch.v_cache, batch.block_tables, batch.context_lens
    with pytest.raises(ValueError, match="3 query heads do not divide among 2"):
        paged_decode_attention(q[:, :3], k, v, tables, lens, AttentionKind(1.0))
    with pytest.raises(TypeError, match="float16"):
        paged_decode_attention(q.half(), k, v, tables, lens, AttentionKind(1.0))
    with pytest.raises(TypeError, match="int32"):
        paged_decode_attention(q, k, v, tables.long(), lens, AttentionKind(1.0))
    with pytest.raises(ValueError, match="head size 32"):
        paged_decode_attention(q[..., :32], k, v, tables, lens, AttentionKind(1.0))
    other = decode_workspace(q, 1)
    with pytest.raises(ValueError, match="is for other heads"):
        paged_decode_attention(q, k, v, tables, lens, AttentionKind(1.0), workspace=other)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "contexts",
    [[1], [2500], [999] * 4, [1000, 0, 1, 16] * 4, [640] * 40, [700, 5] * 40, [9000] + [33] * 255],
    ids=lambda contexts: f"batch-{len(contexts)}",
)
def test_every_split_rule_is_right_at_real_sizes(contexts, device, paged, assert_close):
    batch = paged(contexts, (8, 128), 16, torch.bfloat16)
    q = torch.randn(len(contexts), 16, 128, device=device).bfloat16()
    tables, lens = batch.block_tables, batch.context_lens
    out = paged_decode_attention(
        q, batch.k_cache, batch.v_cache, tables, lens, AttentionKind(128**-0.5)
    )
    assert_close(out, batch.attention(q, list(range(len(contexts) + 1)), AttentionKind(128**-0.5)))


@pytest.mark.gpu
def test_a_captured_graph_follows_growing_contexts(device, paged, assert_close):
    batch = paged([700, 90, 1], (8, 128), 16, torch.bfloat16)
    q = torch.randn(3, 16, 128, device=device).bfloat16()
    lens, out, workspace = batch.context_lens.clone(), torch.empty_like(q), decode_workspace(q, 8)
    args = (
        q,
        batch.k_cache,
        batch.v_cache,
        batch.block_tables,
        lens,
        AttentionKind(0.1),
        out,
        workspace,
    )
    lens.fill_(1)
    paged_decode_attention(*args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        paged_decode_attention(*args)
    for contexts in ([1, 0, 0], [33, 90, 1], [700, 64, 0]):
        lens.copy_(torch.tensor(contexts, dtype=torch.int32))
        graph.replay()
        batch.context_lens.copy_(lens)
        assert_close(out, batch.attention(q, [0, 1, 2, 3], AttentionKind(0.1)))
