"""The prefix cache: a hit always has the right content, and no entry outlives its block."""

import numpy as np
import pytest

from scheduler_svc.core.kv.block_pool import BlockPool
from scheduler_svc.core.kv.prefix_cache import NO_PARENT, PrefixCache
from scheduler_svc.core.request.block_hash import chain

SIZE = 2


def tokens(*token_ids: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(token_ids, dtype=np.int32)


def insert(cache: PrefixCache, block_ids: list[int], *token_ids: int) -> list[int]:
    """Inserts a whole prompt with these blocks; returns its hashes."""
    content = tokens(*token_ids)
    hashes = chain(content, SIZE)
    parents = np.array([NO_PARENT, *hashes[:-1]], dtype=np.uint64)
    cache.insert(np.array(block_ids), hashes, parents, content.reshape(-1, SIZE))
    return hashes


def lookup(cache: PrefixCache, *token_ids: int) -> list[int]:
    return cache.lookup(chain(tokens(*token_ids), SIZE), tokens(*token_ids))


def test_the_longest_cached_prefix_is_found() -> None:
    cache = PrefixCache(10, SIZE)
    insert(cache, [4, 7, 2], 1, 2, 3, 4, 5, 6)
    assert lookup(cache, 1, 2, 3, 4, 5, 6) == [4, 7, 2]
    assert lookup(cache, 1, 2, 3, 4, 9, 9) == [4, 7]
    assert lookup(cache, 1, 2, 3) == [4]
    assert lookup(cache, 9, 2, 3, 4) == []


def test_the_walk_stops_at_the_first_block_that_is_gone() -> None:
    cache = PrefixCache(10, SIZE)
    insert(cache, [4, 7, 2], 1, 2, 3, 4, 5, 6)
    cache.evict(7)
    assert lookup(cache, 1, 2, 3, 4, 5, 6) == [4]


def test_content_computed_behind_another_prefix_is_never_reused() -> None:
    """A and B are different prefixes of the same X; X's block is handed out to B's."""
    pool = BlockPool(3, SIZE)
    insert(pool.cache, pool.take(2), 1, 1, 7, 7)
    pool.release([1, 2])
    taken = pool.take(2)
    insert(pool.cache, [taken[1], taken[0]], 2, 2, 7, 7)
    assert lookup(pool.cache, 1, 1, 7, 7) == []
    assert lookup(pool.cache, 2, 2, 7, 7) == [taken[1], taken[0]]


@pytest.mark.parametrize("what", ["tokens", "parent"])
def test_a_hash_that_collides_is_not_a_hit(what: str) -> None:
    cache = PrefixCache(10, SIZE)
    content = tokens(1, 2, 3, 4)
    hashes = chain(content, SIZE)
    stored, parents = content.reshape(-1, SIZE).copy(), [NO_PARENT, hashes[0]]
    if what == "tokens":
        stored[1, 0] += 1
    else:
        parents[1] += 1
    cache.insert(np.array([5, 6]), hashes, np.array(parents, dtype=np.uint64), stored)
    assert lookup(cache, 1, 2, 3, 4) == [5]


def test_a_freed_block_can_be_found_until_it_is_handed_out_anew() -> None:
    pool = BlockPool(3, SIZE)
    insert(pool.cache, pool.take(1), 1, 2)
    pool.release([1])
    assert lookup(pool.cache, 1, 2) == [1]
    pool.take(1)  # block 2: nothing is evicted
    assert lookup(pool.cache, 1, 2) == [1]
    pool.take(1)
    assert lookup(pool.cache, 1, 2) == []
    assert pool.cache.hash_of(1) is None


def test_a_second_block_with_the_same_content_takes_over() -> None:
    cache = PrefixCache(10, SIZE)
    for block_id in (3, 5, 6):
        insert(cache, [block_id], 1, 2)
    assert lookup(cache, 1, 2) == [3]
    cache.evict(5)
    cache.evict(3)
    assert lookup(cache, 1, 2) == [6]
    cache.evict(6)
    assert lookup(cache, 1, 2) == [] and len(cache) == 0


def test_evicting_what_was_never_cached_does_nothing() -> None:
    cache = PrefixCache(10, SIZE)
    insert(cache, [3], 1, 2)
    cache.evict(4)
    assert lookup(cache, 1, 2) == [3]


def test_the_index_never_holds_more_than_the_pool_has_blocks() -> None:
    pool = BlockPool(3, SIZE)
    for request in range(1000):
        hold = pool.take(2)
        insert(pool.cache, hold, request, 1, request, 2)
        pool.release(hold)
        assert len(pool.cache) == 2
    assert len(pool.cache._block_of) == 2 and not pool.cache._duplicates
