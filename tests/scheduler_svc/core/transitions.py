"""Rules between two states of a scheduler, which one state alone cannot show."""

from itertools import pairwise

from scheduler_svc.core import Scheduler
from scheduler_svc.core.kv.block_pool import BlockPool
from scheduler_svc.core.request.block_hash import chain
from tests.scheduler_svc.core.fake_worker import Content, FakeWorker


class FreeQueueWatch:
    """Checks that blocks are freed to the tail, last block first, and taken from the head.

    A block that is found again leaves the queue from the middle; the others keep their places, and
    a free block keeps the hash under which it can be found.
    """

    def __init__(self) -> None:
        self._pool: BlockPool | None = None
        self._free: list[int] = []
        self._hash_of: dict[int, int | None] = {}
        self._holders: list[list[int]] = []

    def check(self, scheduler: Scheduler, may_forget: bool) -> None:
        """Compares the queue with the last one; with `may_forget`, hashes may have been dropped."""
        pool = scheduler.internal_state.pool
        free = list(pool.free_queue())
        if pool is self._pool:
            self._check_order(free, is_sliding=bool(scheduler.config.sliding_window))
            if not may_forget:
                for block_id in free:
                    expected = self._hash_of.get(block_id, pool.cache.hash_of(block_id))
                    assert pool.cache.hash_of(block_id) == expected, "a free block lost its hash"
        self._pool, self._free = pool, free
        self._hash_of = {block_id: pool.cache.hash_of(block_id) for block_id in free}
        self._holders = _holders(scheduler)

    def _check_order(self, free: list[int], is_sliding: bool) -> None:
        before, now = set(self._free), set(free)
        stayed = [block_id for block_id in self._free if block_id in now]
        assert free[: len(stayed)] == stayed, "the free queue was shuffled"
        place = {block_id: index for index, block_id in enumerate(free)}
        if is_sliding:  # blocks before the window are freed while later ones are in use
            return
        freed = now - before
        for block_ids in self._holders:
            for block_id, following in pairwise(block_ids):
                if block_id not in freed or following not in freed:
                    continue
                # A prompt that was computed twice has two chains, and a third may mix them.
                if all(block_id in hold for hold in self._holders if following in hold):
                    assert place[following] < place[block_id], "a chain's head was freed first"


def _holders(scheduler: Scheduler) -> list[list[int]]:
    state = scheduler.internal_state
    running = [state.table.held_blocks(s.slot) for s in state.running.sequences]
    return running + [list(entry.block_ids) for entry in state._fenced]


class CacheTruth:
    """Checks that the worker's memory holds the hashed content of every cached block."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._contents: dict[int, list[Content]] = {}  # hash to the content of a block's cells
        self._roots: dict[int, Content] = {}

    def check(self, scheduler: Scheduler, worker: FakeWorker) -> None:
        """Compares every entry of the prefix cache with the worker's memory."""
        if worker.roots is not self._roots:  # another worker, or the cache was emptied
            self._roots, self._contents = worker.roots, {}
        cache = scheduler.internal_state.pool.cache
        entries = {b: cache.hash_of(b) for b in range(1, scheduler.internal_state.pool.num_blocks)}
        unknown = {b: h for b, h in entries.items() if h is not None and h not in self._contents}
        while unknown:
            known = [b for b in unknown if self._learn(scheduler, b, unknown[b])]
            if not known and scheduler.config.sliding_window:
                self._learn_from_sequences(scheduler)
                known = [b for b in unknown if unknown[b] in self._contents]
            assert known, f"blocks {sorted(unknown)} follow a parent that was never sealed"
            unknown = {b: h for b, h in unknown.items() if b not in known}
        for block_id, block_hash in entries.items():
            if block_hash is not None:
                cells = [worker.kv.get((block_id, i)) for i in range(self._block_size)]
                assert cells == self._contents[block_hash], f"block {block_id} holds other tokens"

    def _learn_from_sequences(self, scheduler: Scheduler) -> None:
        """Reads hashes from sequences: a block may be freed before it is sealed."""
        for sequence in scheduler.live():
            slot, size = sequence.slot, self._block_size
            if sequence.is_private or sequence.root not in self._roots:
                continue
            tokens = (
                sequence.token_ids if slot is None else scheduler.internal_state.table.tokens(slot)
            )
            content = self._roots[sequence.root]
            for index, block_hash in enumerate(chain(tokens, size, sequence.root or None)):
                contents = []
                for token_id in tokens[index * size : (index + 1) * size].tolist():
                    content = hash((content, token_id))
                    contents.append(content)
                self._contents.setdefault(block_hash, contents)

    def _learn(self, scheduler: Scheduler, block_id: int, block_hash: int) -> bool:
        cache = scheduler.internal_state.pool.cache
        parent = int(cache._parents[block_id])
        if parent not in self._roots and parent not in self._contents:
            return False
        content = self._roots[parent] if parent in self._roots else self._contents[parent][-1]
        contents = []
        for token_id in cache._tokens[block_id].tolist():
            content = hash((content, token_id))
            contents.append(content)
        self._contents[block_hash] = contents
        return True
