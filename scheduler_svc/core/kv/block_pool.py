"""Fixed pool of KV-cache blocks, shared by reference count.

The pool handles block ids only, never tensors: the worker owns the memory, the scheduler the
bookkeeping. Block 0 is the null block: filler of block tables, never handed out.

Invariants: a block is in the free queue exactly when its reference count is 0; a freed block keeps
its content, and can be found and shared again, until it is handed out anew; the block freed longest
ago is handed out first.
"""

from array import array
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from scheduler_svc.core.kv.cache_changes import CacheChanges, Cleared
from scheduler_svc.core.kv.prefix_cache import NULL_BLOCK, PrefixCache


class OutOfBlocks(Exception):
    """Raised when more blocks are requested than are free."""


class BlockPool:
    """Reference counts and the queue of free blocks; every operation is O(1) per block.

    The free queue is a doubly linked list threaded through two arrays, with the null block as both
    of its ends: next[0] is the head, prev[0] the tail.
    """

    def __init__(self, num_blocks: int, block_size: int, *more_sizes: int) -> None:
        """The sizes are the tokens per block of each KV group."""
        self.num_blocks = num_blocks
        self.num_free = num_blocks - 1
        self.cache = PrefixCache(num_blocks, block_size)  # of group 0
        is_cached = self.cache.is_cached
        self._others = tuple(PrefixCache(num_blocks, size, is_cached) for size in more_sizes)
        self.caches = (self.cache, *self._others)  # by group
        # Arrays, not lists: the garbage collector would scan lists of a million entries.
        self._ref_count = array("i", bytes(4 * num_blocks))
        self._next = array("i", [*range(1, num_blocks), NULL_BLOCK])
        self._prev = array("i", [num_blocks - 1, *range(num_blocks - 1)])

    def follow(self, changes: CacheChanges) -> None:
        """Has all later changes of what can be found noted."""
        for group, cache in enumerate(self.caches):
            cache.group, cache.changes = group, changes

    @property
    def num_usable(self) -> int:
        """Number of blocks that can be handed out: all but the null block."""
        return self.num_blocks - 1

    @property
    def usage(self) -> float:
        """Fraction of the usable blocks that are referenced, 0 to 1."""
        return 1.0 - self.num_free / self.num_usable if self.num_usable else 0.0

    @property
    def ref_counts(self) -> NDArray[np.int32]:
        """[num_blocks] sequences that hold each block: a view that refuses writes."""
        counts = np.frombuffer(self._ref_count, dtype=np.intc)
        counts.flags.writeable = False
        return counts

    def ref_count(self, block_id: int) -> int:
        """Number of sequences that hold a block."""
        return self._ref_count[block_id]

    def free_queue(self) -> Iterable[int]:
        """The free blocks, in the order in which they will be handed out."""
        block_id = self._next[NULL_BLOCK]
        while block_id != NULL_BLOCK:
            yield block_id
            block_id = self._next[block_id]

    def take(self, count: int) -> list[int]:
        """Hands out `count` blocks with one reference each and evicts their content.

        Raises OutOfBlocks, with nothing changed, when fewer are free.
        """
        if count > self.num_free:
            raise OutOfBlocks(f"asked for {count} blocks, {self.num_free} free")
        following, ref_count = self._next, self._ref_count
        evict = self._evict if self._others else self.cache.evict
        taken = []
        block_id = following[NULL_BLOCK]
        for _ in range(count):
            taken.append(block_id)
            evict(block_id)
            ref_count[block_id] = 1
            block_id = following[block_id]
        following[NULL_BLOCK] = block_id
        self._prev[block_id] = NULL_BLOCK
        self.num_free -= count
        return taken

    def share(self, block_ids: Iterable[int]) -> None:
        """Adds a reference to each block; a free one leaves the free queue, at any position."""
        for block_id in block_ids:
            if self._ref_count[block_id] == 0:
                before, after = self._prev[block_id], self._next[block_id]
                self._next[before] = after
                self._prev[after] = before
                self.num_free -= 1
            self._ref_count[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Drops one reference of each block of a sequence, given in the sequence's order."""
        ref_count = self._ref_count
        # Last block first, so that the head of a shared prompt is handed out anew last: a chain
        # without its head can never be found again.
        for block_id in reversed(block_ids):
            assert ref_count[block_id] > 0, f"block {block_id} released more often than held"
            ref_count[block_id] -= 1
            if ref_count[block_id] == 0:
                self._append(block_id)

    def release_filled(self, block_ids: Sequence[int]) -> None:
        """As `release`, of blocks of a chain that no sequence but a transfer has filled."""
        self.release(block_ids)

    def discard(self, block_id: int) -> None:
        """Forgets a free block's content, and hands this block out first."""
        self._evict(block_id)
        self.demote(block_id)

    def demote(self, block_id: int) -> None:
        """Hands out this free block first, which keeps its content until then."""
        assert not self._ref_count[block_id], f"block {block_id} is held"
        before, after = self._prev[block_id], self._next[block_id]
        self._next[before], self._prev[after] = after, before
        first = self._next[NULL_BLOCK]
        self._next[NULL_BLOCK], self._prev[block_id] = block_id, NULL_BLOCK
        self._next[block_id], self._prev[first] = first, block_id

    def num_free_among(self, block_ids: Iterable[int]) -> int:
        """Number of these blocks that are free and that sharing would take."""
        return sum(self._ref_count[block_id] == 0 for block_id in block_ids)

    def hash_of(self, block_id: int) -> int | None:
        """The hash of a block's content, in whichever cache it is; None when it is in none."""
        for cache in self.caches:
            if (found := cache.hash_of(block_id)) is not None:
                return found
        return None

    @property
    def num_cached(self) -> int:
        """Number of blocks whose content a prefix can hit."""
        return sum(map(len, self.caches))

    @property
    def num_evictions(self) -> int:
        """Contents forgotten because their block was handed out anew."""
        return sum(cache.num_evictions for cache in self.caches)

    def forget_contents(self) -> int:
        """Empties the caches; returns the number of blocks that had content."""
        if (changes := self.cache.changes) is not None:
            changes.add(Cleared())
        return sum(cache.clear() for cache in self.caches)

    def _evict(self, block_id: int) -> None:
        for cache in self.caches:
            cache.evict(block_id)

    def _append(self, block_id: int, end: int = NULL_BLOCK) -> None:
        last = self._prev[end]
        self._next[last] = block_id
        self._prev[block_id] = last
        self._next[block_id] = end
        self._prev[end] = block_id
        self.num_free += 1
