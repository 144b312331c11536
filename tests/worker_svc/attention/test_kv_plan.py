"""Pages of equal size for groups of layers, and layers as views of one pool of them."""

import numpy as np
import pytest
import torch

from kernels.reference import KvRows
from worker_svc.attention.kv_plan import MOST_UNUSED, KvPlan, plan_of
from worker_svc.attention.layer_cache import KvShape, LayerCache
from worker_svc.attention.page_cache import PageCache
from worker_svc.protocol.kv_groups import LayerGroup
from worker_svc.protocol.step import StepMoves
from worker_svc.runner.block_mover import BlockMover

CPU = torch.device("cpu")
HEADS = KvShape(num_kv_heads=2, k_dim=8, v_dim=8)


def column(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def plan(num_windowed: int, num_full: int, window: int = 64) -> KvPlan | None:
    windows = [window] * num_windowed + [None] * num_full
    return plan_of([HEADS] * len(windows), windows, 16, torch.float16)


@pytest.mark.parametrize(
    ("num_windowed", "num_full", "sizes"),
    [
        (12, 12, (16, 16)),  # gpt-oss-20b
        (24, 8, (48, 16)),  # OLMo 3 7B
        (22, 4, (80, 16)),  # Gemma 3 1B: 5.5 layers to one
        (29, 5, (80, 16)),  # Gemma 3 4B
        (52, 10, (80, 16)),  # Gemma 3 27B
        (1, 3, (16, 48)),
        (6, 4, (48, 32)),  # 1.5 layers to one: equal with twice the tokens
        (5, 3, (48, 32)),
    ],
)
def test_a_group_of_fewer_layers_has_more_tokens_in_a_page(
    num_windowed: int, num_full: int, sizes: tuple[int, int]
) -> None:
    found = plan(num_windowed, num_full)
    assert found is not None
    assert found.groups == (LayerGroup(sizes[0]), LayerGroup(sizes[1], window=64))
    assert found.page_bytes == 2 * found.page_width
    used = [
        sum(HEADS.width * place.block_size for place in found.places if place.group == group)
        for group in (0, 1)
    ]
    assert max(used) <= found.page_width
    assert min(used) >= (1 - MOST_UNUSED) * found.page_width


@pytest.mark.parametrize(("length", "percent"), [(8192, 28), (32768, 20)])
def test_a_sequence_of_gemma_3_4b_holds_a_fraction_of_one_table(length: int, percent: int) -> None:
    found = plan(29, 5, window=1024)
    assert found is not None
    pages = sum(group.most_blocks(length, chunk=1) for group in found.groups)
    in_one_table = length * sum(shape.width for shape in found.shapes)
    assert round(100 * pages * found.page_width / in_one_table) == percent


def test_pages_that_would_be_mostly_unused_are_none() -> None:
    assert plan(60, 1) is None
    assert plan(21, 1) is None
    assert plan(20, 1) is not None
    # A page holds whole rows of every layer, and these have nothing in common.
    odd = [KvShape(1, 5, 5), KvShape(1, 7, 7), KvShape(1, 6, 3), HEADS]
    assert plan_of(odd, [None, 9, 9, 9], 4, torch.float32) is None


def test_layers_of_one_window_are_one_group_and_need_no_pages() -> None:
    found = plan(3, 0)
    assert found is not None
    assert found.groups == (LayerGroup(16, window=64),)
    cache = LayerCache(found.shapes, 5, 16, torch.float16, CPU)
    assert found.page_bytes == torch.empty(0, dtype=torch.float16).itemsize * cache.block_shape[0]


def test_each_window_is_a_group_and_the_one_without_is_the_first() -> None:
    found = plan_of([HEADS] * 4, [64, 8, None, 64], 4, torch.float32)
    assert found is not None
    assert [group.window for group in found.groups] == [None, 8, 64]
    assert [place.group for place in found.places] == [2, 1, 0, 2]
    assert "4 tokens in 2 layers that see the last 64" in found.in_words(7)


MIXED = {
    "equal layers": [HEADS] * 4,
    "layers of other heads": [HEADS, KvShape(1, 16, 16), KvShape(1, 24, 24), HEADS],
    "values of another size": [KvShape(1, 24, 8), HEADS, KvShape(2, 12, 4), HEADS],
}


@pytest.fixture(params=list(MIXED))
def pool(request: pytest.FixtureRequest) -> tuple[KvPlan, PageCache]:
    shapes = MIXED[request.param]
    found = plan_of(shapes, [None, 9, 9, 9], 4, torch.float32)
    assert found is not None
    return found, PageCache(found, 6, CPU)


def test_layers_of_a_group_lie_apart_in_a_page(pool: tuple[KvPlan, PageCache]) -> None:
    """Every layer is written in pages of its group, and has its own numbers afterwards."""
    found, cache = pool
    pages = {0: [1, 4], 1: [2, 5]}
    written: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for index, place in enumerate(found.places):
        kv = cache.of_layer(index)
        k, v = kv.k, kv.v
        assert k.shape[:2] == v.shape[:2] == (6, place.block_size)
        for part in (k, v):
            part[pages[place.group]] = torch.randn_like(part[pages[place.group]])
        written[index] = k[pages[place.group]].clone(), v[pages[place.group]].clone()
    for index, place in enumerate(found.places):
        kv = cache.of_layer(index)
        k, v = kv.k, kv.v
        assert torch.equal(k[pages[place.group]], written[index][0])
        assert torch.equal(v[pages[place.group]], written[index][1])
    untouched = cache.read_blocks(torch.tensor([0, 3]))
    assert not untouched.any()


def test_rows_are_the_same_keys_and_values_by_slot(pool: tuple[KvPlan, PageCache]) -> None:
    found, cache = pool
    cache.write_blocks(torch.arange(6), torch.randn(6, *cache.block_shape))
    for index, place in enumerate(found.places):
        slots = torch.arange(6 * place.block_size)
        kv = cache.of_layer(index)
        keys, values = kv.rows if isinstance(kv.rows, KvRows) else kv.rows.unbind(1)
        assert torch.equal(keys[kv.rows_of(slots)], kv.k.flatten(0, 1))
        assert torch.equal(values[kv.rows_of(slots)], kv.v.flatten(0, 1))
        assert torch.equal(keys, kv.k_rows)
        assert torch.equal(values, kv.v_rows)
        assert kv.rows_of(slots).max() == len(keys) - 1
        assert kv.rows_per_block == place.rows_per_block


def test_pages_are_moved_whole(pool: tuple[KvPlan, PageCache]) -> None:
    _, cache = pool
    cache.write_blocks(torch.arange(6), torch.randn(6, *cache.block_shape))
    before = cache.read_blocks(torch.arange(6))
    mover = BlockMover(cache, 2, CPU)
    none = column()
    mover.apply(StepMoves(column(1, 2), column(1, 0), none, none, column(3), column(1)))
    mover.apply(StepMoves(none, none, column(1, 0), column(4, 5), none, none))
    after = cache.read_blocks(torch.arange(6))
    assert torch.equal(after, before[[0, 3, 2, 3, 1, 2]])
