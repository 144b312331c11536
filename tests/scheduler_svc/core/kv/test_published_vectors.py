"""Published claims of paged KV, replayed: the order of free blocks, and a sequence's waste."""

import numpy as np
import pytest

from scheduler_svc.core.kv.block_pool import BlockPool
from tests.scheduler_svc.core.builders import answer, make_request, make_scheduler

BLOCK = 4


def test_free_blocks_queue_up_as_in_the_published_replay() -> None:
    """Ten blocks, prompts of 8, 7 and 5 tokens, and the first one again.

    The published pool begins with block 0, which here is the null block: ids are larger by one.
    """
    pool = BlockPool(11, BLOCK)

    def queue() -> list[int]:
        return [block_id - 1 for block_id in pool.free_queue()]

    first, second = pool.take(2), pool.take(2)
    assert ([b - 1 for b in first], [b - 1 for b in second]) == ([0, 1], [2, 3])
    assert queue() == [4, 5, 6, 7, 8, 9]
    pool.release(first)
    assert queue() == [4, 5, 6, 7, 8, 9, 1, 0]
    assert [block_id - 1 for block_id in pool.take(2)] == [4, 5]
    assert queue() == [6, 7, 8, 9, 1, 0]
    pool.share(first)
    assert queue() == [6, 7, 8, 9]


@pytest.mark.parametrize("budget", [5, 64])
def test_a_running_sequence_wastes_less_than_a_block(budget: int) -> None:
    """The memory that it holds for tokens that do not exist is less than a block."""
    scheduler = make_scheduler(blocks=64, max_num_batched_tokens=budget, max_num_seqs=4)
    view = scheduler.view
    for length in (1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 30):
        prompt = np.arange(length) + 30 * length  # nothing in common
        scheduler.add(make_request(f"r{length}", prompt.tolist(), max_tokens=2 * BLOCK + 1))
    num_looks = 0
    while (plan := scheduler.schedule()) is not None:
        for sequence in view.running:
            assert view.num_blocks_of(sequence) * BLOCK - view.num_tokens(sequence) < BLOCK
            num_looks += 1
        answer(scheduler, *[500] * len(plan.sampled_slots))
    assert num_looks > 50
    assert view.num_free_blocks == view.num_blocks == 64
