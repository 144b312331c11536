"""Whole KV blocks on the move, byte for byte, on each kind of device."""

import numpy as np
import pytest
import torch

from worker_svc.attention.kv_cache import KVCache
from worker_svc.protocol.step import StepMoves
from worker_svc.runner.block_mover import BlockMover

NO_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NO_CUDA])]
NUM_BLOCKS = 100


def make_cache(device: torch.device) -> KVCache:
    cache = KVCache(
        num_layers=3,
        num_blocks=NUM_BLOCKS,
        block_size=4,
        num_kv_heads=2,
        head_dim=8,
        dtype=torch.float32,
        device=device,
    )
    everything = torch.arange(NUM_BLOCKS, device=device)
    generator = torch.Generator().manual_seed(0)
    content = torch.randn((NUM_BLOCKS, *cache.block_shape), generator=generator)
    cache.write_blocks(everything, content.to(device))
    return cache


def contents(cache: KVCache, device: torch.device) -> list[torch.Tensor]:
    return list(cache.read_blocks(torch.arange(NUM_BLOCKS, device=device)).cpu())


def moves(**columns: list[int]) -> StepMoves:
    names = ("swapped_out", "to_host", "from_host", "swapped_in", "copied_from", "copied_to")
    return StepMoves(*(np.array(columns.get(name, []), dtype=np.int64) for name in names))


PLACES = {
    "side by side": list(range(70)),
    "backwards": list(reversed(range(70))),
    "in runs": [*range(40, 70), *range(10), 39, *range(10, 39)],
    "every other": [*range(0, 70, 2), *range(1, 70, 2)],
}


@pytest.mark.parametrize("places", PLACES.values(), ids=PLACES.keys())
@pytest.mark.parametrize("device_name", DEVICES)
def test_blocks_come_back_from_the_host_as_they_went(device_name: str, places: list[int]) -> None:
    device = torch.device(device_name)
    cache = make_cache(device)
    mover, before = BlockMover(cache, 70, device), contents(cache, device)
    out = list(range(1, 71))  # in more than one part
    mover.apply(moves(swapped_out=out, to_host=places))
    cache.write_blocks(
        torch.tensor(out, device=device), torch.zeros((70, *cache.block_shape), device=device)
    )
    back = list(reversed(range(30, 100)))
    mover.apply(moves(from_host=list(range(70)), swapped_in=back))
    after = contents(cache, device)
    source_of = dict(zip(places, out, strict=True))
    for host_block, target in enumerate(back):
        assert torch.equal(after[target], before[source_of[host_block]])
    assert not any(after[block].any() for block in range(1, 30))


@pytest.mark.parametrize("device_name", DEVICES)
def test_a_block_goes_out_before_another_comes_in_and_a_copy_sees_it(device_name: str) -> None:
    device = torch.device(device_name)
    cache = make_cache(device)
    mover, before = BlockMover(cache, 4, device), contents(cache, device)
    mover.apply(moves(swapped_out=[5], to_host=[0]))
    # Block 6 goes out and takes in what was block 5's, and block 7 gets a copy of that.
    mover.apply(
        moves(
            swapped_out=[6],
            to_host=[3],
            from_host=[0],
            swapped_in=[6],
            copied_from=[6],
            copied_to=[7],
        )
    )
    mover.apply(moves(from_host=[3], swapped_in=[8]))
    after = contents(cache, device)
    assert torch.equal(after[6], before[5]) and torch.equal(after[7], before[5])
    assert torch.equal(after[8], before[6])
    untouched = [block for block in range(NUM_BLOCKS) if block not in (6, 7, 8)]
    assert all(torch.equal(after[block], before[block]) for block in untouched)
