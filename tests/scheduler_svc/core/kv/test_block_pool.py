"""The block pool: reference counts, and which block is handed out next."""

import random
from collections import OrderedDict

import pytest

from scheduler_svc.core.kv.block_pool import NULL_BLOCK, BlockPool, OutOfBlocks


def free(pool: BlockPool) -> list[int]:
    return list(pool.free_queue())


def test_a_new_pool_hands_out_all_but_the_null_block_in_order() -> None:
    pool = BlockPool(num_blocks=5, block_size=4)
    assert pool.num_free == pool.num_usable == 4
    assert pool.take(4) == [1, 2, 3, 4]
    assert free(pool) == []


def test_asking_for_more_than_is_free_takes_nothing() -> None:
    pool = BlockPool(5, 4)
    pool.take(3)
    with pytest.raises(OutOfBlocks, match="asked for 2 blocks, 1 free"):
        pool.take(2)
    assert free(pool) == [4] and pool.num_free == 1


def test_blocks_come_back_tail_first_so_that_heads_live_longest() -> None:
    pool = BlockPool(7, 4)
    hold = pool.take(3)
    pool.release(hold)
    assert free(pool) == [4, 5, 6, 3, 2, 1]


def test_a_shared_block_is_free_when_its_last_holder_lets_go() -> None:
    pool = BlockPool(4, 4)
    pool.take(1)
    pool.share([1])
    pool.release([1])
    assert pool.ref_count(1) == 1 and 1 not in free(pool)
    pool.release([1])
    assert pool.ref_count(1) == 0 and free(pool)[-1] == 1


@pytest.mark.parametrize("block_id", [1, 2, 3])
def test_sharing_takes_a_free_block_out_of_the_queue_wherever_it_stands(block_id: int) -> None:
    pool = BlockPool(4, 4)
    assert pool.num_free_among([1, 2, 3]) == 3
    pool.share([block_id])
    assert free(pool) == [b for b in (1, 2, 3) if b != block_id]
    assert pool.num_free == 2 and pool.num_free_among([1, 2, 3]) == 2
    pool.release([block_id])
    assert free(pool)[-1] == block_id


def test_releasing_a_block_that_nobody_holds_is_a_bug_of_the_caller() -> None:
    with pytest.raises(AssertionError, match="block 2 released more often than held"):
        BlockPool(4, 4).release([2])


def test_usage_leaves_the_null_block_out() -> None:
    pool = BlockPool(5, 4)
    assert pool.usage == 0.0
    pool.take(1)
    assert pool.usage == 0.25
    assert BlockPool(1, 4).usage == 0.0


def test_taking_no_block_changes_nothing() -> None:
    pool = BlockPool(3, 4)
    assert pool.take(0) == []
    assert free(pool) == [1, 2]


@pytest.mark.parametrize("seed", range(5))
def test_the_linked_queue_agrees_with_an_ordered_dict(seed: int) -> None:
    rng = random.Random(seed)
    pool, model = BlockPool(12, 4), OrderedDict.fromkeys(range(1, 12))
    hold: list[int] = []
    for _ in range(500):
        action = rng.choice(["take", "share", "release"])
        if action == "take":
            count = rng.randint(0, len(model))
            taken = pool.take(count)
            assert taken == [model.popitem(last=False)[0] for _ in range(count)]
            hold += taken
        elif action == "share":
            block_id = rng.randint(1, 11)
            pool.share([block_id])
            model.pop(block_id, None)
            hold.append(block_id)
        elif hold:
            some = rng.sample(sorted(set(hold)), rng.randint(1, len(set(hold))))
            for block_id in some:
                hold.remove(block_id)
            pool.release(some)
            for block_id in reversed(some):
                if block_id not in hold:
                    model[block_id] = None
        assert free(pool) == list(model)
        assert all(pool.ref_count(b) == hold.count(b) for b in range(1, 12))
        assert NULL_BLOCK not in hold
