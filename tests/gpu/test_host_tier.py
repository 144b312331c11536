"""The tier in host memory on a GPU: copies on streams of their own, next to graphs."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.pace import patience
from tests.worker_svc.conftest import WORKER_CONFIG, Worker, serving
from tests.worker_svc.runner import test_host_tier as of_worker
from worker_svc.attention.kv_cache import KVCache
from worker_svc.device.host_memory import pinned_bytes
from worker_svc.protocol.transfers import TransferEnd, TransferOrder
from worker_svc.runner.block_mover import BLOCKS_AT_ONCE
from worker_svc.runner.host_tier import HostTier
from worker_svc.startup.kv_sizing import available_memory_bytes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
CONFIG = replace(WORKER_CONFIG, device="cuda", host_tier_gib=0.001)


@pytest.fixture(scope="module")
def tiered_worker(llama_folder: Path) -> Iterator[Worker]:
    with serving(CONFIG, llama_folder) as ready:
        yield ready


test_a_prompt = of_worker.test_a_prompt_goes_on_after_fetched_blocks_as_if_it_had_computed_them
test_another_key = of_worker.test_a_block_with_another_key_ends_a_fetch_before_it


def test_pinned_memory_has_the_size_that_was_asked_for() -> None:
    """Not the next power of two; and the host's pages are given back."""
    size = (1 << 30) + 4096
    before = available_memory_bytes()
    pages = pinned_bytes(size)
    assert pages.is_pinned() and pages.shape == (size,) and not pages.any()
    copied = torch.ones(size, dtype=torch.uint8, device="cuda")
    pages.copy_(copied, non_blocking=True)
    torch.cuda.synchronize()
    assert pages.all()
    assert size * 0.9 < before - available_memory_bytes() < size * 1.5
    del pages
    assert before - available_memory_bytes() < size * 0.5


def test_copies_of_both_ways_at_once_are_whole() -> None:
    """While the device is busy on another stream, and with more blocks than one copy takes."""
    device, num_blocks = torch.device("cuda"), 5 * BLOCKS_AT_ONCE + 3
    cache = KVCache(4, 2 * num_blocks + 1, 16, 2, 64, torch.bfloat16, device)
    tier = HostTier(cache, 2 * num_blocks, device)
    first, second = np.arange(1, num_blocks + 1), np.arange(num_blocks + 1, 2 * num_blocks + 1)
    ids = torch.arange(1, 2 * num_blocks + 1, device=device)
    content = torch.randn(2 * num_blocks, *cache.block_shape, device=device).bfloat16()
    cache.write_blocks(ids, content)
    torch.cuda.synchronize()
    ends: dict[int, TransferEnd] = {}

    def submit(number: int, blocks: np.ndarray, *, is_fetch: bool) -> None:
        keys = np.stack([blocks, blocks], axis=1).astype(np.uint64)
        order = TransferOrder(number, is_fetch, blocks, blocks, keys)
        tier.submit(order, lambda: False, ends.__setitem__)

    def wait() -> None:
        done = threading.Event()
        tier.when_done(done.set)
        assert done.wait(patience(60))

    noise = torch.randn(4096, 4096, device=device)
    submit(1, first, is_fetch=False)
    wait()
    cache.write_blocks(ids[:num_blocks], torch.zeros_like(content[:num_blocks]))
    torch.cuda.synchronize()
    for _ in range(50):
        noise = torch.tanh(noise @ noise)
    submit(2, second, is_fetch=False)
    submit(3, first, is_fetch=True)
    wait()
    cache.write_blocks(ids[num_blocks:], torch.zeros_like(content[num_blocks:]))
    torch.cuda.synchronize()
    submit(4, second, is_fetch=True)
    wait()
    assert {number: end.num_blocks for number, end in ends.items()} == dict.fromkeys(
        range(1, 5), num_blocks
    )
    assert torch.equal(cache.read_blocks(ids), content)
    assert torch.isfinite(noise).all()
