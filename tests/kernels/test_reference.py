"""Reference kernels against their definitions, written out element by element."""

import math

import pytest
import torch
from torch import Tensor

from kernels import reference
from kernels.attention_kind import AttentionKind

BLOCK_SIZE = 4
EPS = 1e-5


def dense_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal attention of one sequence in float64; the last query attends to all keys."""
    num_queries, num_heads, head_dim = q.shape
    num_keys, num_kv_heads = k.shape[:2]
    out = torch.zeros(num_queries, num_heads, head_dim, dtype=torch.float64)
    for query in range(num_queries):
        seen = num_keys - num_queries + query + 1
        for head in range(num_heads):
            kv_head = head // (num_heads // num_kv_heads)
            scores = k[:seen, kv_head].double() @ q[query, head].double() * scale
            out[query, head] = scores.softmax(0) @ v[:seen, kv_head].double()
    return out


class PagedBatch:
    """Sequences with keys and values in shuffled blocks of a cache filled with NaN."""

    def __init__(self, contexts: list[int], num_heads: int, num_kv_heads: int, dim: int) -> None:
        torch.manual_seed(sum(contexts) + num_heads)
        widths = [-(-context // BLOCK_SIZE) for context in contexts]
        self.block_tables = torch.zeros(len(contexts), max(widths) + 2, dtype=torch.int32)
        block_ids = iter((torch.randperm(sum(widths)) + 1).tolist())
        shape = (sum(widths) + 1, BLOCK_SIZE, num_kv_heads, dim)
        self.k_cache, self.v_cache = torch.full(shape, math.nan), torch.full(shape, math.nan)
        self.context_lens = torch.tensor(contexts, dtype=torch.int32)
        self.keys, self.values = [], []
        for row, (context, width) in enumerate(zip(contexts, widths, strict=True)):
            table = torch.tensor([next(block_ids) for _ in range(width)], dtype=torch.int32)
            self.block_tables[row, :width] = table
            k, v = torch.randn(2, context, num_kv_heads, dim)
            self.keys.append(k)
            self.values.append(v)
            positions = torch.arange(context)
            slots = table[positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
            reference.write_kv(k, v, self.k_cache, self.v_cache, slots)

    def check(self, query_lens: list[int], num_heads: int) -> None:
        dim = self.k_cache.shape[3]
        q = torch.randn(sum(query_lens), num_heads, dim)
        cu_seqlens_q = torch.tensor([0, *query_lens]).cumsum(0).int()
        out = reference.paged_attention(
            q,
            self.k_cache,
            self.v_cache,
            self.block_tables,
            self.context_lens,
            cu_seqlens_q,
            max(query_lens),
            AttentionKind(dim**-0.5),
        )
        expected = [
            dense_attention(queries, k, v, dim**-0.5)
            for queries, k, v in zip(q.split(query_lens), self.keys, self.values, strict=True)
        ]
        torch.testing.assert_close(out.double(), torch.cat(expected), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("context", [1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 30])
def test_one_query_over_a_paged_context_is_dense_attention(context: int, num_kv_heads: int) -> None:
    PagedBatch([context], 4, num_kv_heads, 8).check([1], 4)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_a_batch_mixes_decodes_whole_prompts_and_chunks(num_kv_heads: int) -> None:
    batch = PagedBatch([9, 1, 7, 13, 4, 16], 4, num_kv_heads, 6)
    batch.check([1, 1, 7, 5, 4, 1], 4)


@pytest.mark.parametrize("num_cached", [0, 3])
def test_long_prompts_are_tiled_without_a_seam(num_cached: int) -> None:
    num_queries = reference.QUERY_TILE + 5
    PagedBatch([num_cached + num_queries], 2, 1, 4).check([num_queries], 2)


def test_decodes_of_very_different_lengths_do_not_share_padding() -> None:
    contexts = [700, 3, 650, 40, 300]
    batch = PagedBatch(contexts, 2, 1, 4)
    batch.check([1] * len(contexts), 2)
    plan = reference.AttentionPlan.build(
        batch.block_tables,
        batch.context_lens,
        torch.arange(len(contexts) + 1),
        BLOCK_SIZE,
        torch.float32,
        AttentionKind(0.5),
    )
    assert [group.length for group in plan.groups] == [700, 300, 40]


def test_rows_without_context_get_zeros_and_read_nothing() -> None:
    batch = PagedBatch([5, 3], 2, 1, 4)
    tables = torch.cat((batch.block_tables, torch.zeros_like(batch.block_tables[:1])))
    context_lens = torch.tensor([5, 3, 0], dtype=torch.int32)
    q = torch.randn(3, 2, 4)
    out = reference.paged_decode_attention(
        q, batch.k_cache, batch.v_cache, tables, context_lens, AttentionKind(0.5)
    )
    expected = reference.paged_decode_attention(
        q[:2],
        batch.k_cache,
        batch.v_cache,
        batch.block_tables,
        batch.context_lens,
        AttentionKind(0.5),
    )
    assert torch.equal(out[2], torch.zeros(2, 4))
    torch.testing.assert_close(out[:2], expected)


def test_a_poisoned_sequence_leaves_its_neighbours_alone() -> None:
    batch = PagedBatch([6, 11], 2, 1, 4)
    batch.k_cache[batch.block_tables[1, 0]] = math.nan
    q = torch.randn(2, 2, 4)
    out = reference.paged_decode_attention(
        q, batch.k_cache, batch.v_cache, batch.block_tables, batch.context_lens, AttentionKind(0.5)
    )
    assert out[0].isfinite().all()
    assert out[1].isnan().all()


def test_writing_kv_skips_padding_and_touches_nothing_else() -> None:
    k_cache, v_cache = torch.zeros(2, 3, BLOCK_SIZE, 2, 4)
    k, v = torch.randn(2, 4, 2, 4)
    reference.write_kv(k, v, k_cache, v_cache, torch.tensor([9, -1, 0, -7]))
    for cache, written in ((k_cache, k), (v_cache, v)):
        rows = cache.flatten(0, 1)
        assert torch.equal(rows[9], written[0])
        assert torch.equal(rows[0], written[2])
        assert rows.count_nonzero() == written[[0, 2]].count_nonzero()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 8), (5, 33), (3, 4, 8)])
def test_rms_norm_divides_by_the_root_mean_square(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + EPS).sqrt()
    out = reference.rms_norm(x, weight, EPS)
    assert out.dtype == dtype
    torch.testing.assert_close(out, (exact.to(dtype).double() * weight.double()).to(dtype))


def test_rms_norm_of_tiny_values_is_bounded_by_eps() -> None:
    x = torch.full((1, 4), 1e-6)
    expected = x / math.sqrt(1e-12 + EPS)
    torch.testing.assert_close(reference.rms_norm(x, torch.ones(4), EPS), expected)


def test_norms_leave_their_float32_inputs_as_they_were() -> None:
    x, residual, weight = torch.randn(3, 8), torch.randn(3, 8), torch.randn(8)
    before = x.clone(), residual.clone(), weight.clone()
    normed, total = reference.add_rms_norm(x, residual, weight, EPS)
    torch.testing.assert_close(total, x + residual)
    torch.testing.assert_close(normed, reference.rms_norm(x + residual, weight, EPS))
    for tensor, original in zip((x, residual, weight), before, strict=True):
        assert torch.equal(tensor, original)


def test_silu_and_mul_gates_with_the_first_half() -> None:
    x = torch.randn(3, 10)
    before = x.clone()
    gate, up = x[:, :5], x[:, 5:]
    torch.testing.assert_close(reference.silu_and_mul(x), gate * gate.sigmoid() * up)
    assert torch.equal(x, before)


def test_rotation_turns_each_pair_by_its_own_angle() -> None:
    torch.manual_seed(0)
    angles = torch.rand(20, 3) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    positions = torch.tensor([7, 0, 19])
    q, k = torch.randn(3, 4, 6), torch.randn(3, 2, 6)
    before = q.clone()
    for x, rotated in zip(
        (q, k), reference.rotary_embedding(q, k, positions, cos_sin), strict=True
    ):
        turn = torch.polar(torch.ones(3, 3), angles[positions]).unsqueeze(1)
        expected = torch.complex(x[..., :3], x[..., 3:]) * turn
        torch.testing.assert_close(rotated, torch.cat((expected.real, expected.imag), dim=-1))
    assert torch.equal(q, before)
