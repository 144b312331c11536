"""The kernel of few rows over an FP8 cache: what rotation, writing and attention do in turn."""

import pytest
import torch

from kernels import fp8
from kernels.attention.decode_attention import paged_decode_attention
from kernels.attention.rope import norm_rope_write_kv
from kernels.attention_kind import AttentionKind
from kernels.cluster import decode_float8_rows

CUDA = torch.device("cuda")
SCALE, EPS, D, KV_HEADS = 128**-0.5, 1e-6, 128, 3
LENGTHS = [0, 1, 2, 15, 16, 17, 31, 64, 100, 129, 576, 577, 1999, 2048, 2049, 9000]
kinds = pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])


class Case:
    """Rows of mixed lengths with random projections, and a cache that holds all but the newest."""

    def __init__(self, lengths, group, block_size, kv_dtype, has_norms, seed=0):
        random = torch.Generator(CUDA).manual_seed(seed)
        width = -(-max(*lengths, 1) // block_size)
        shape = (1 + len(lengths) * width, block_size, 2, KV_HEADS, D)
        both = torch.randn(shape, device=CUDA, generator=random)
        table = torch.rand((2, KV_HEADS), device=CUDA, generator=random) + 0.01
        self.scales = fp8.scale_table(*table)
        self.stored = fp8.narrowed(both, self.scales[2:], kv_dtype)
        self.offsets = torch.randn((KV_HEADS, D), device=CUDA, generator=random)
        order = torch.randperm(shape[0] - 1, device=CUDA, generator=random) + 1
        self.tables = order.int().view(len(lengths), width)
        self.lens = torch.tensor(lengths, dtype=torch.int32, device=CUDA)
        self.positions = (self.lens - 1).clamp_(min=0).long()
        at = self.positions // block_size
        blocks = self.tables.long().gather(1, at.unsqueeze(1)).squeeze(1)
        self.slots = blocks * block_size + self.positions % block_size
        self.slots[self.lens == 0] = -1
        heads = (group + 2) * KV_HEADS
        qkv = torch.randn((len(lengths), heads * D), device=CUDA, generator=random)
        self.qkv = qkv.bfloat16()
        angles = torch.rand((max(*lengths, 1), D // 2), device=CUDA, generator=random) * 6.3
        self.cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
        weights = torch.rand((2, D), device=CUDA, generator=random) + 0.5
        self.norms = tuple(weights.bfloat16()) if has_norms else None

    def in_turn(self):
        """(attended, stored) by two kernels."""
        stored = self.stored.clone()
        k, v = stored.unbind(2)
        norms = self.norms or (None, None)
        q = norm_rope_write_kv(
            self.qkv, self.positions, self.cos_sin, k, v, self.slots, *norms, EPS,
            kv_scales=self.scales, key_offsets=self.offsets,
        )  # fmt: skip
        found = paged_decode_attention(
            q, k, v, self.tables, self.lens, AttentionKind(SCALE), kv_scales=self.scales
        )
        return found, stored.view(torch.uint8)

    def at_once(self):
        """(attended, stored) by one."""
        stored = self.stored.clone()
        k, v = stored.unbind(2)
        given = self.qkv, k, self.norms is not None, len(self.cos_sin)
        kernels = decode_float8_rows.kernels_for(*given)
        assert kernels is not None
        found = kernels.attend(
            self.qkv, self.positions, self.slots, self.cos_sin, self.norms, EPS, k, v,
            self.tables, self.lens, SCALE, self.scales, self.offsets,
        )  # fmt: skip
        return found, stored.view(torch.uint8)


def forget():
    """Forgets kernels that are compiled for clusters of another size."""
    decode_float8_rows._of.cache_clear()
    decode_float8_rows._prepared.cache_clear()


def assert_near(found, expected):
    distance = (found.double() - expected.double()).norm()
    assert distance <= 1e-2 * expected.double().norm()


@pytest.mark.gpu
@kinds
@pytest.mark.parametrize("cluster", [1, 2, 4, 8, 16])
@pytest.mark.parametrize(
    ("group", "block_size", "has_norms"),
    [(1, 16, True), (2, 32, False), (4, 16, True), (7, 64, False), (8, 16, True)],
)
def test_one_kernel_does_what_two_do_in_turn(
    group, block_size, has_norms, cluster, kv_dtype, monkeypatch
):
    monkeypatch.setattr(decode_float8_rows, "cluster_for", lambda *_: cluster)
    forget()
    case = Case(LENGTHS, group, block_size, kv_dtype, has_norms, seed=group)
    (found, stored), (expected, expected_stored) = case.at_once(), case.in_turn()
    forget()
    assert (found[0] == 0).all()
    different = stored != expected_stored
    # The order of a head's sum of squares may differ, and with it the last bit of few numbers.
    assert different.sum() <= 1e-3 * len(LENGTHS) * 2 * KV_HEADS * D
    for row, expected_row in zip(found[1:], expected[1:], strict=True):
        assert_near(row, expected_row)


@pytest.mark.gpu
@pytest.mark.parametrize("length", [1, 40, 576, 32_000])
def test_one_row_alone(length):
    case = Case([length], 4, 16, torch.float8_e4m3fn, True)
    assert_near(case.at_once()[0], case.in_turn()[0])


@pytest.mark.gpu
@kinds
def test_what_is_no_number_is_stored_as_such_and_large_numbers_saturate(kv_dtype):
    case = Case([40, 40, 40, 40], 4, 16, kv_dtype, False)
    heads = case.qkv.view(4, -1, D)
    heads[0, 4 * KV_HEADS :, 5] = torch.inf  # keys and values
    heads[1, 4 * KV_HEADS :, 5] = torch.nan
    heads[2, :] = 3e38
    (found, stored), (expected, expected_stored) = case.at_once(), case.in_turn()
    as_numbers = stored.view(kv_dtype).float(), expected_stored.view(kv_dtype).float()
    assert torch.equal(*(numbers.isnan() for numbers in as_numbers))
    assert_near(as_numbers[0].nan_to_num(), as_numbers[1].nan_to_num())
    assert_near(found[3], expected[3])
    assert found[1].isnan().any()


@pytest.mark.gpu
def test_a_row_without_a_slot_is_not_stored():
    case = Case([20, 20], 4, 16, torch.float8_e4m3fn, True)
    expected = case.in_turn()[0]
    case.slots.fill_(-1)
    found, stored = case.at_once()
    assert torch.equal(stored, case.stored.view(torch.uint8))
    assert_near(found, expected)


@pytest.mark.gpu
def test_a_captured_graph_follows_lengths():
    case = Case([700], 4, 16, torch.float8_e4m3fn, True)
    case.at_once()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found, _ = case.at_once()
    for length in (1, 16, 17, 333, 700):
        case.lens.fill_(length)
        case.positions.fill_(length - 1)
        block = int(case.tables[0, (length - 1) // 16])
        case.slots.fill_(block * 16 + (length - 1) % 16)
        graph.replay()
        assert_near(found, case.in_turn()[0])
