"""The index of a tier that outlives processes: what its worker's files hold, by key alone.

The worker tells the keys of what it has found on its disk; their tokens are nowhere else. So a
content is found by its hash and the check in its key, and the worker compares the tokens with those
in the file. The numbers of the blocks here are this index's own: the worker never sees them, and is
told what to drop by key. It has as many blocks as the worker's disk has room for files.

Files outlive a reset of the cache as well, unless the worker has removed them: until it has shown
that it did, nothing is found that it tells, and after a loss of its stream it is told once more.
"""

from dataclasses import dataclass
from itertools import islice

import numpy as np

from scheduler_svc.core.kv.chain import BlockIds, Chain, Keys
from scheduler_svc.core.kv.tier import Tier, TierCounts, TierName

_NO_TOKENS = 1  # tokens per block of an index that knows none


@dataclass(frozen=True, slots=True)
class Drops:
    """Contents whose files the worker should remove."""

    keys: Keys  # [n, 2]
    is_all: bool = False  # and whatever else it holds


class DiskIndex(Tier):
    """The contents of one worker's disk, each in a block of this index."""

    name = TierName.DISK
    max_stored_share = 8  # a disk is slow, and the blocks are held for as long as it writes

    def __init__(self, num_blocks: int, counts: TierCounts, *, drops_all: bool = False) -> None:
        """`drops_all` says that the files are void, as the index before it knew."""
        super().__init__(num_blocks, _NO_TOKENS, counts)
        self._drops_all = drops_all  # the worker is to be told
        self._dropped_before: int | None = None  # it was, before this transfer; not shown yet
        self._checks = np.zeros(num_blocks + 1, dtype=np.uint64)  # by block
        self._dropped: list[tuple[int, int]] = []  # keys, since the last `take_drops`

    def find(self, chain: Chain) -> BlockIds:
        """The blocks of the longest prefix of a chain whose keys are here."""
        if not (found := self.pool.cache.likely(chain.hashes)):
            return []
        differs = self._checks[found] != chain.part(0, len(found)).keys[:, 1]
        return found[: int(differs.argmax())] if differs.any() else found

    def take(self, num_blocks: int) -> BlockIds:
        """Hands out blocks to be stored to, and drops what they held."""
        for block in islice(self.pool.free_queue(), num_blocks):
            if (block_hash := self.pool.cache.hash_of(block)) is not None:
                self._dropped.append((block_hash, int(self._checks[block])))
        return super().take(num_blocks)

    def _insert(self, blocks: BlockIds, chain: Chain) -> None:
        self._insert_keys(blocks, chain.keys)

    def _insert_keys(self, blocks: BlockIds, keys: Keys) -> None:
        nothing = np.zeros(len(blocks), dtype=np.uint64)
        self.pool.cache.insert(
            np.array(blocks, dtype=np.int32), keys[:, 0].tolist(), nothing, nothing[:, None]
        )
        self._checks[blocks] = keys[:, 1]

    def hear(self, keys: Keys) -> None:
        """Lets contents be found that the worker's files hold, the one used longest ago first.

        Those for which there is no room are dropped.
        """
        if self.is_void:
            return
        _, firsts = np.unique(keys[:, 0], return_index=True)
        distinct = keys[np.sort(firsts)]
        new = distinct[[not self.pool.cache.likely((h,)) for h in distinct[:, 0].tolist()]]
        begin = max(len(new) - self.pool.num_free, 0)
        self._dropped += map(tuple, new[:begin].tolist())
        blocks = self.take(len(new) - begin)
        self._insert_keys(blocks, new[begin:])
        self.pool.release(blocks[::-1])  # which frees the last one given first

    def clear(self) -> None:
        """Forgets all contents, and has the files removed."""
        super().clear()
        self._dropped.clear()
        self._drops_all = True

    @property
    def is_void(self) -> bool:
        """True if the worker may still have files from before they were all to be removed."""
        return self._drops_all or self._dropped_before is not None

    def take_drops(self, next_id: int) -> Drops | None:
        """Returns what the worker should remove before this transfer; None: nothing new."""
        if not self._dropped and not self._drops_all:
            return None
        keys = np.array(self._dropped, dtype=np.uint64).reshape(-1, 2)
        drops = Drops(keys, self._drops_all)
        if self._drops_all:
            self._drops_all, self._dropped_before = False, next_id
        self._dropped.clear()
        return drops

    def was_stored(self, transfer_id: int) -> None:
        """Notes that the worker has stored, after what it was told to do before this transfer."""
        if self._dropped_before is not None and transfer_id >= self._dropped_before:
            self._dropped_before = None

    def stream_ended(self) -> None:
        """Has the files removed once more, if it is not known that they were."""
        if self.is_void:
            self._dropped_before = None
            self.clear()
