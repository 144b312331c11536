"""FP8 KV caches on a GPU: the kernels at real sizes, and a graph over a cache in FP8."""

import pytest
import torch

from kernels import fp8
from kernels.attention.decode_attention import paged_decode_attention
from kernels.attention.prefill_attention import paged_attention
from kernels.attention.rope import norm_rope_write_kv
from kernels.attention.workspace import decode_workspace
from kernels.attention_kind import AttentionKind
from kernels.cluster import decode_float8

CUDA = torch.device("cuda")
SCALE = 128**-0.5
kinds = pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])


def make(num_seqs, context, kv_dtype):
    """(FP8 caches and scales, what they count as in bfloat16, tables, lengths)."""
    width = -(-context // 16)
    shape = (1 + num_seqs * width, 16, 2, 8, 128)
    random = torch.Generator(CUDA).manual_seed(0)
    both = torch.randn(shape, device=CUDA, generator=random)
    scales = fp8.scale_table(*(torch.rand((2, 8), device=CUDA, generator=random) + 0.01))
    stored = fp8.narrowed(both, scales[2:], kv_dtype)
    # Powers of two would widen exactly; others are rounded to bfloat16 by the reference alone.
    exact = fp8.widened(stored, scales[:2], torch.bfloat16)
    tables = torch.arange(1, shape[0], dtype=torch.int32, device=CUDA).view(num_seqs, width)
    lens = torch.full((num_seqs,), context, dtype=torch.int32, device=CUDA)
    return (*stored.unbind(2), scales), exact.unbind(2), tables, lens


def assert_near(found, expected):
    distance = (found.double() - expected.double()).norm()
    assert distance <= 1e-2 * expected.double().norm()


@pytest.mark.gpu
@kinds
@pytest.mark.parametrize(("num_seqs", "context"), [(1, 2500), (4, 999), (40, 640), (256, 576)])
def test_every_split_rule_attends_to_what_is_stored(num_seqs, context, kv_dtype):
    (k, v, scales), exact, tables, lens = make(num_seqs, context, kv_dtype)
    q = torch.randn(num_seqs, 16, 128, device=CUDA).bfloat16()
    found = paged_decode_attention(q, k, v, tables, lens, AttentionKind(SCALE), kv_scales=scales)
    assert_near(found, paged_decode_attention(q, *exact, tables, lens, AttentionKind(SCALE)))


@pytest.mark.gpu
@kinds
@pytest.mark.parametrize(("num_seqs", "context", "queries"), [(1, 4096, 4096), (3, 900, 200)])
def test_prompts_and_chunks_attend_to_what_is_stored(num_seqs, context, queries, kv_dtype):
    (k, v, scales), exact, tables, lens = make(num_seqs, context, kv_dtype)
    q = torch.randn(num_seqs * queries, 16, 128, device=CUDA).bfloat16()
    cu = torch.arange(num_seqs + 1, dtype=torch.int32, device=CUDA) * queries
    found = paged_attention(
        q, k, v, tables, lens, cu, queries, AttentionKind(SCALE), kv_scales=scales
    )
    assert_near(found, paged_attention(q, *exact, tables, lens, cu, queries, AttentionKind(SCALE)))


@pytest.mark.gpu
@kinds
def test_nan_that_was_stored_is_nan_for_its_sequence_alone(kv_dtype):
    (k, v, scales), _, tables, lens = make(2, 64, kv_dtype)
    k.view(torch.uint8)[tables[1, 0].long(), 3] = 0x7F
    q = torch.randn(2, 16, 128, device=CUDA).bfloat16()
    found = paged_decode_attention(q, k, v, tables, lens, AttentionKind(SCALE), kv_scales=scales)
    assert found[0].isfinite().all()
    assert found[1].isnan().all()


@pytest.mark.gpu
def test_a_captured_graph_reads_the_cache_in_fp8():
    (k, v, scales), exact, tables, lens = make(3, 640, torch.float8_e4m3fn)
    q = torch.randn(3, 16, 128, device=CUDA).bfloat16()
    out, workspace = torch.empty_like(q), decode_workspace(q, 8)
    arguments = (q, k, v, tables, lens, AttentionKind(SCALE), out, workspace, scales)
    paged_decode_attention(*arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        paged_decode_attention(*arguments)
    for length in (1, 33, 640):
        lens.fill_(length)
        graph.replay()
        assert_near(out, paged_decode_attention(q, *exact, tables, lens, AttentionKind(SCALE)))


LENGTHS = (0, 1, 15, 16, 17, 31, 64, 100, 576, 577, 1999, 4100)


def ragged(group, block_size, kv_dtype, num_kv_heads=3, lengths=LENGTHS):
    """(q, FP8 caches and scales, caches of what they count as, tables, lengths) of mixed rows."""
    width = -(-max(lengths) // block_size)
    shape = (1 + len(lengths) * width, block_size, 2, num_kv_heads, 128)
    random = torch.Generator(CUDA).manual_seed(group)
    both = torch.randn(shape, device=CUDA, generator=random)
    table = torch.rand((2, num_kv_heads), device=CUDA, generator=random) + 0.01
    scales = fp8.scale_table(*table)
    stored = fp8.narrowed(both, scales[2:], kv_dtype)
    exact = fp8.widened(stored, scales[:2], torch.bfloat16)
    order = torch.randperm(shape[0] - 1, device=CUDA, generator=random) + 1
    tables = order.int().view(len(lengths), width)
    lens = torch.tensor(lengths, dtype=torch.int32, device=CUDA)
    q = torch.randn(len(lengths), num_kv_heads * group, 128, device=CUDA, generator=random)
    return q.bfloat16(), (*stored.unbind(2), scales), exact.unbind(2), tables, lens


def assert_rows_near(found, expected, lens):
    for row, length in enumerate(lens.tolist()):
        if length:
            assert_near(found[row], expected[row])
        else:
            assert (found[row] == 0).all()


@pytest.mark.gpu
@kinds
@pytest.mark.parametrize(
    ("group", "block_size", "num_kv_heads"),
    [
        (1, 16, 8), (2, 32, 8), (4, 16, 8), (7, 64, 8), (8, 16, 8), (4, 16, 1), (8, 128, 2),
        (3, 32, 3), (4, 16, 4), (5, 16, 5), (2, 16, 6), (1, 16, 7), (1, 32, 10), (2, 16, 16),
    ],
)  # fmt: skip
def test_the_kernel_of_many_rows_attends_to_what_is_stored(
    group, block_size, num_kv_heads, kv_dtype
):
    q, (k, v, scales), exact, tables, lens = ragged(group, block_size, kv_dtype, num_kv_heads)
    kernel = decode_float8.kernel_for(q, k)
    assert kernel is not None
    expected = paged_decode_attention(q, *exact, tables, lens, AttentionKind(SCALE))
    # Twice: what a launch leaves is not found by the next.
    for _ in range(2):
        found = kernel.attend(q, k, v, tables, lens, SCALE, scales)
        assert_rows_near(found, expected, lens)
    # Large queries: what matters is which is the largest, not whether float16 has the number.
    found = kernel.attend(q * 1e5, k, v, tables, lens, SCALE * 1e-5, scales)
    assert_rows_near(found, expected, lens)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "lengths",
    [
        (1,), (0, 0, 0), (9000,), (0, 0, 5, 0), (17,) * 132, (576,) * 256, (3000, *(1,) * 300),
        (*(1,) * 300, 3000), tuple(range(300, 0, -1)), (40,) * 700,
    ],
)  # fmt: skip
@pytest.mark.parametrize("num_kv_heads", [2, 8])
def test_contexts_are_shared_out_whatever_their_lengths(lengths, num_kv_heads):
    q, (k, v, scales), exact, tables, lens = ragged(
        4, 16, torch.float8_e4m3fn, num_kv_heads, lengths
    )
    kernel = decode_float8.kernel_for(q, k)
    assert kernel is not None
    found = kernel.attend(q, k, v, tables, lens, SCALE, scales)
    assert_rows_near(
        found, paged_decode_attention(q, *exact, tables, lens, AttentionKind(SCALE)), lens
    )


@pytest.mark.gpu
@kinds
@pytest.mark.parametrize("factor", [0.0, 0.01, 0.2])
def test_scores_that_rise_by_little_and_by_much(factor, kv_dtype):
    """With 0.2 by up to 90, some 7 a tile; they fall for another head."""
    q, (k, v, _), _, tables, lens = ragged(4, 16, kv_dtype)
    both, places = torch.stack((k, v), 2), torch.arange(max(LENGTHS), device=CUDA)
    doublings = places[:, None] / 200 * torch.tensor([1.0, -1.0, 0.25], device=CUDA)
    ramp = doublings.clamp(-6, 6).exp2()[..., None]
    for row in tables.long():
        keys = both[row[places // 16], places % 16, 0].float().abs() * ramp
        both[row[places // 16], places % 16, 0] = keys.clamp(max=400).to(kv_dtype)
    scales = fp8.scale_table(*torch.ones((2, 3), device=CUDA))
    kernel = decode_float8.kernel_for(q, k)
    assert kernel is not None
    found = kernel.attend(q.abs(), *both.unbind(2), tables, lens, SCALE * factor, scales)
    exact = both.bfloat16().unbind(2)
    expected = paged_decode_attention(q.abs(), *exact, tables, lens, AttentionKind(SCALE * factor))
    assert_rows_near(found, expected, lens)


@pytest.mark.gpu
def test_a_graph_shares_contexts_out_anew_at_each_replay():
    q, (k, v, scales), exact, tables, lens = ragged(
        4, 16, torch.float8_e4m3fn, 8, tuple(range(1, 800, 7))
    )
    kernel = decode_float8.kernel_for(q, k)
    assert kernel is not None
    out = torch.empty_like(q)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel.attend(q, k, v, tables, lens, SCALE, scales, out)
    for _ in range(5):
        graph.replay()
        first = out.clone()
        graph.replay()
        assert torch.equal(out, first)  # whatever the order in which blocks end
        assert_rows_near(
            out, paged_decode_attention(q, *exact, tables, lens, AttentionKind(SCALE)), lens
        )
        lens.copy_(lens[torch.randperm(len(lens), device=CUDA)].clamp_(max=700))
        lens[::9] = 0


@pytest.mark.gpu
def test_old_tokens_are_read_while_the_kernel_before_writes_the_newest():
    """As a step does: attention starts ahead of the end of what rotates and stores."""
    lengths = tuple(range(1, 400, 3))
    q, (k, v, scales), _, tables, lens = ragged(4, 16, torch.float8_e4m3fn, 8, lengths)
    kernel = decode_float8.kernel_for(q, k)
    assert kernel is not None
    position = (lens - 1).long()
    slots = tables.long().gather(1, (position // 16)[:, None]).squeeze(1) * 16 + position % 16
    angles = torch.zeros((400, 64), device=CUDA)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    for seed in range(20):
        random = torch.Generator(CUDA).manual_seed(seed)
        qkv = torch.randn((len(lengths), 48 * 128), device=CUDA, generator=random).bfloat16()
        rotated = norm_rope_write_kv(qkv, position, cos_sin, k, v, slots, kv_scales=scales)
        found = kernel.attend(rotated, k, v, tables, lens, SCALE, scales)
        torch.cuda.synchronize()
        assert torch.equal(found, kernel.attend(rotated, k, v, tables, lens, SCALE, scales))


@pytest.mark.gpu
@kinds
def test_what_lies_past_the_end_is_not_read_as_numbers(kv_dtype):
    q, (k, v, scales), exact, tables, lens = ragged(4, 16, kv_dtype)
    kernel = decode_float8.kernel_for(q, k)
    assert kernel is not None
    expected = paged_decode_attention(q, *exact, tables, lens, AttentionKind(SCALE))
    for row, length in enumerate(lens.tolist()):
        for block in range(length // 16, tables.shape[1]):
            begin = length % 16 if block == length // 16 else 0
            for cache in (k, v):
                cache.view(torch.uint8)[tables[row, block].long(), begin:] = 0x7F
    assert_near(kernel.attend(q, k, v, tables, lens, SCALE, scales), expected)
    v.view(torch.uint8)[tables[8, 0].long(), 3] = 0x7F  # a number of row 8 that is none
    found = kernel.attend(q, k, v, tables, lens, SCALE, scales)
    assert found[8].isnan().all()
    assert found[:8].isfinite().all()
    assert found[9:].isfinite().all()
