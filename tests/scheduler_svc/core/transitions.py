"""Rules between two states of a scheduler, which one state alone cannot show."""

from itertools import pairwise

from scheduler_svc.core import CachePolicy, KvGroup, Scheduler
from scheduler_svc.core.kv.block_pool import BlockPool
from scheduler_svc.core.request.block_hash import chain_with
from scheduler_svc.core.request.identity import Root
from scheduler_svc.core.request.request import Extras
from tests.scheduler_svc.core.fake_worker import (
    Content,
    FakeWorker,
    content_of,
    in_group,
    picture_at,
)


class FreeQueueWatch:
    """Checks that by LRU blocks are freed to the tail, last block first, and taken from the head.

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
        hash_of = {block_id: pool.hash_of(block_id) for block_id in free}
        if pool is self._pool:
            if scheduler.config.cache_policy is CachePolicy.LRU:
                self._check_order(free, is_sliding=scheduler.config.has_window)
            if not may_forget:
                for block_id, found in hash_of.items():
                    expected = self._hash_of.get(block_id, found)
                    assert found == expected, "a free block lost its hash"
        self._pool, self._free, self._hash_of = pool, free, hash_of
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
    """Checks that the worker's memory holds the hashed content of each cached block of a group."""

    def __init__(self, group: int, kv_group: KvGroup) -> None:
        self._group = group
        self._block_size = kv_group.block_size
        self._has_window = kv_group.window is not None
        self._contents: dict[int, list[Content]] = {}  # hash to the content of a block's cells
        self._begins: dict[int, int] = {}  # hash to the position of its first cell
        self._told: object = None  # the worker's roots
        self._roots: dict[int, Content] = {}  # by the hash that first blocks have as their parent
        self._extras: dict[bytes, Extras] = {}  # by origin: the pictures up to a block's end

    def check(self, scheduler: Scheduler, worker: FakeWorker) -> None:
        """Compares every entry of the prefix cache with the worker's memory."""
        if worker.roots is not self._told:  # another worker, or the cache was emptied
            self._told, self._contents, self._begins = worker.roots, {}, {}
        self._roots = {
            Root(salt, adapter_id=adapter_id).hash: content
            for (salt, adapter_id), content in worker.roots.items()
        }
        self._note_pictures(scheduler)
        if self._has_window:
            self._learn_from_sequences(scheduler)
        cache = scheduler.internal_state.pool.caches[self._group]
        entries = cache._hash_of.items()
        unknown = {b: h for b, h in entries if h not in self._contents}
        while unknown:
            known = [b for b in unknown if self._learn(scheduler, b, unknown[b])]
            assert known, f"blocks {sorted(unknown)} follow a parent that was never sealed"
            unknown = {b: h for b, h in unknown.items() if b not in known}
        for block_id, block_hash in entries:
            cells = [worker.kv.get((block_id, i)) for i in range(self._block_size)]
            expected = [in_group(self._group, one) for one in self._contents[block_hash]]
            assert cells == expected, f"block {block_id} holds other tokens"

    def _note_pictures(self, scheduler: Scheduler) -> None:
        for sequence in scheduler.live():
            extras = sequence.request.extras
            if extras and sequence.origins is not None:
                for count, digest in enumerate(sequence.origins.digests):
                    self._extras[digest.tobytes()] = extras[:count]

    def _learn_from_sequences(self, scheduler: Scheduler) -> None:
        """Reads hashes from sequences: a block may be freed before it is sealed.

        It is swapped out, say, with the token in flight after which it would be sealed, and is
        before the window when its sequence comes back.
        """
        for sequence in scheduler.live():
            slot, size = sequence.slot, self._block_size
            if sequence.is_private or sequence.root not in self._roots:
                continue
            tokens = (
                sequence.token_ids if slot is None else scheduler.internal_state.table.tokens(slot)
            )
            content, extras = self._roots[sequence.root], sequence.request.extras
            hashes = chain_with(extras, 0, tokens, size, sequence.root or None)
            for index, block_hash in enumerate(hashes):
                begin = index * size
                contents = _contents(content, begin, tokens[begin : begin + size].tolist(), extras)
                content = contents[-1]
                self._contents.setdefault(block_hash, contents)
                self._begins.setdefault(block_hash, begin)

    def _learn(self, scheduler: Scheduler, block_id: int, block_hash: int) -> bool:
        cache = scheduler.internal_state.pool.caches[self._group]
        parent = int(cache._parents[block_id])
        if parent not in self._roots and parent not in self._contents:
            return False
        content, begin = self._roots.get(parent, 0), 0
        if parent not in self._roots:
            content, begin = self._contents[parent][-1], self._begins[parent] + self._block_size
        origin = b"" if cache._origins is None else cache._origins[block_id].tobytes()
        tokens, extras = cache._tokens[block_id].tolist(), self._extras.get(origin, ())
        self._contents[block_hash] = _contents(content, begin, tokens, extras)
        self._begins[block_hash] = begin
        return True


def _contents(before: Content, begin: int, token_ids: list[int], extras: Extras) -> list[Content]:
    """The content of each cell of a block, which begins at this position."""
    contents = []
    for position, token_id in enumerate(token_ids, start=begin):
        before = content_of(before, token_id, picture_at(extras, position))
        contents.append(before)
    return contents
