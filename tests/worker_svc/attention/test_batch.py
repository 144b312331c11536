"""A step's attention as layers see it: from the fused projection to the attended values."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels import reference
from kernels.attention_kind import AttentionKind
from worker_svc.attention.batch import AttentionBatch, HeadLayout
from worker_svc.attention.kv_cache import KVCache
from worker_svc.attention.layer_cache import KvShape, LayerCache
from worker_svc.attention.rope_tables import RopeTables
from worker_svc.attention.torch_backend import AttentionParts, AttentionStep
from worker_svc.models.rope import RotaryConfig, cos_sin_table

CPU = torch.device("cpu")
HEADS = HeadLayout(num_heads=4, num_kv_heads=2, head_dim=8)
KINDS = [AttentionKind(HEADS.scale)] * 3
BLOCK_SIZE = 4
COS_SIN = cos_sin_table(RotaryConfig(10_000.0), 8, 64)
PARTS = AttentionParts([HEADS] * 3, KINDS, RopeTables((COS_SIN,), (0, 0, 0)), torch.float32)


def make_cache(num_layers: int = 1) -> KVCache:
    return KVCache(num_layers, 8, BLOCK_SIZE, 2, 8, torch.float32, CPU)


def make_batch(
    tables: list[list[int]], computed: list[int], scheduled: list[int]
) -> tuple[Tensor, AttentionBatch]:
    """Positions and batch of sequences with these blocks, as a runner would build them."""
    block_tables = torch.tensor(tables, dtype=torch.int32)
    positions, slots = [], []
    for table, start, count in zip(tables, computed, scheduled, strict=True):
        for position in range(start, start + count):
            positions.append(position)
            slots.append(table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE)
    context_lens = torch.tensor(computed) + torch.tensor(scheduled)
    batch = AttentionBatch(
        slot_mapping=torch.tensor(slots),
        block_tables=block_tables,
        context_lens=context_lens.int(),
        cu_seqlens_q=torch.tensor([0, *scheduled]).cumsum(0).int(),
        max_seqlen_q=max(scheduled),
        max_context_len=int(context_lens.max()),
    )
    return torch.tensor(positions), batch


def attend(qkv: Tensor, positions: Tensor, batch: AttentionBatch, cache: KVCache) -> Tensor:
    return AttentionStep(PARTS, batch, positions, cache)(qkv, None, 0.0, 0)


def dense(
    qkv: Tensor,
    qk_norm: Tensor | None = None,
    cos_sin: Tensor = COS_SIN,
    heads: HeadLayout = HEADS,
) -> Tensor:
    """Whole-prompt causal attention of one sequence, without a cache; two heads share a KV head."""
    count = qkv.shape[0]
    sizes = (heads.num_heads, heads.num_kv_heads, heads.num_kv_heads)
    q, k, v = qkv.view(count, -1, heads.head_dim).split(sizes, dim=1)
    if qk_norm is not None:
        q, k = reference.rms_norm(q, qk_norm[:4], 1e-6), reference.rms_norm(k, qk_norm[4:], 1e-6)
    q, k = reference.rotary_embedding(q, k, torch.arange(count), cos_sin)
    k, v = k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * heads.scale
    scores = scores.masked_fill(torch.ones(count, count).triu(1).bool(), -math.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)


@pytest.mark.parametrize("chunk", [1, 3, BLOCK_SIZE, 5, 11])
def test_chunks_over_the_cache_are_the_whole_prompt(chunk: int) -> None:
    torch.manual_seed(chunk)
    qkv, cache = torch.randn(11, 64), make_cache()
    out = []
    for start in range(0, 11, chunk):
        count = min(chunk, 11 - start)
        positions, batch = make_batch([[5, 2, 7]], [start], [count])
        assert batch.is_decode == (count == 1)
        out.append(attend(qkv[start : start + count], positions, batch, cache))
    torch.testing.assert_close(torch.cat(out), dense(qkv), atol=1e-5, rtol=1e-5)


def test_norms_of_q_and_k_come_before_the_rotation() -> None:
    torch.manual_seed(0)
    qkv, qk_norm = torch.randn(6, 64), torch.rand(6, 8)
    positions, batch = make_batch([[3, 1]], [0], [6])
    step = AttentionStep(PARTS, batch, positions, make_cache())
    torch.testing.assert_close(step(qkv, qk_norm, 1e-6, 0), dense(qkv, qk_norm))


def test_sequences_that_share_a_prefix_block_read_the_same_keys() -> None:
    torch.manual_seed(0)
    qkv, cache = torch.randn(6, 64), make_cache()
    positions, batch = make_batch([[3, 1]], [0], [6])
    cold = attend(qkv, positions, batch, cache)
    positions, batch = make_batch([[3, 6]], [4], [2])
    shared = attend(qkv[4:], positions, batch, cache)
    torch.testing.assert_close(shared, cold[4:])


def test_padding_tokens_are_not_stored() -> None:
    cache = make_cache()
    positions, batch = make_batch([[3, 1], [2, 0]], [4, 0], [1, 1])
    batch.slot_mapping[1] = -1
    attend(torch.randn(2, 64), positions, batch, cache)
    k, v = cache.layer(0)
    for half in (k, v):
        assert half[1, 0].count_nonzero() == half[1, 0].numel()
        assert half.count_nonzero() == half[1, 0].numel()


def test_a_layer_writes_its_own_cache_alone() -> None:
    cache = make_cache(num_layers=3)
    positions, batch = make_batch([[1]], [0], [2])
    AttentionStep(PARTS, batch, positions, cache)(torch.randn(2, 64), None, 0.0, 1)
    written = [cache.rows(layer).count_nonzero().item() for layer in range(3)]
    assert written == [0, 2 * 2 * 2 * 8, 0]


def test_layers_with_heads_of_their_own_sizes() -> None:
    """The second layer has eight heads of 4 and four of keys, in as many numbers a token."""
    torch.manual_seed(0)
    qkv = torch.randn(6, 64)
    small = HeadLayout(num_heads=8, num_kv_heads=4, head_dim=4)
    ropes = RopeTables((COS_SIN, cos_sin_table(RotaryConfig(10_000.0), 4, 64)), (0, 1))
    parts = replace(
        PARTS, heads=[HEADS, small], kinds=[KINDS[0], AttentionKind(small.scale)], ropes=ropes
    )
    cache = LayerCache([KvShape(2, 8, 8), KvShape(4, 4, 4)], 8, BLOCK_SIZE, torch.float32, CPU)
    found: list[list[Tensor]] = [[], []]
    for start, count in ((0, 3), (3, 1), (4, 2)):
        positions, batch = make_batch([[3, 1]], [start], [count])
        step = AttentionStep(parts, batch, positions, cache)
        for layer in range(2):
            found[layer].append(step(qkv[start : start + count], None, 0.0, layer))
    expected = dense(qkv), dense(qkv, cos_sin=ropes.tables[1], heads=small)
    for parted, whole in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.cat(parted), whole)


def test_a_layer_rotates_by_its_own_table() -> None:
    torch.manual_seed(0)
    qkv, other = torch.randn(6, 64), cos_sin_table(RotaryConfig(50.0), 8, 64)
    positions, batch = make_batch([[3, 1]], [0], [6])
    parts = replace(PARTS, ropes=RopeTables((COS_SIN, other), (0, 1, 0)))
    step = AttentionStep(parts, batch, positions, make_cache(3))
    found = [step(qkv, None, 0.0, layer) for layer in range(3)]
    for attended, table in zip(found, (COS_SIN, other, COS_SIN), strict=True):
        torch.testing.assert_close(attended, dense(qkv, cos_sin=table))
    assert not torch.allclose(found[0], found[1], atol=1e-2)


def test_a_cache_takes_the_bytes_of_its_keys_and_values() -> None:
    cache = KVCache(3, 5, 4, 2, 8, torch.bfloat16, CPU)
    total = sum(cache.rows(layer).nbytes for layer in range(3))
    assert total == 5 * (3 * 4 * 2 * 2 * 8 * 2)
    k, v = cache.layer(2)
    assert k.shape == v.shape == (5, 4, 2, 8)
