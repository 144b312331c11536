"""The index of a tier: which contents its blocks hold, in memory that is not the device's.

It handles numbers only; the worker owns the memory and copies the bytes. A block of the tier can be
found once it was stored, keeps its content until it is handed out anew, and is checked by what
blocks on the device are checked by. The block used longest ago is handed out first.
"""

from dataclasses import dataclass
from enum import Enum

import numpy as np

from scheduler_svc.core.kv.block_pool import BlockPool
from scheduler_svc.core.kv.chain import BlockIds, Chain


class TierName(Enum):
    """The kinds of tiers."""

    HOST = "host"  # memory of the worker's host
    DISK = "disk"  # files of it


@dataclass(slots=True)
class TierCounts:
    """Totals since start, over all workers, in blocks; none ever goes down."""

    num_fetched: int = 0  # that came whole
    num_not_fetched: int = 0  # that did not
    num_stored: int = 0
    num_not_stored: int = 0  # dropped, since too many were on the way, or the copy failed


class Tier:
    """The blocks of one tier, numbered from 1."""

    name = TierName.HOST
    max_stored_share = 4  # at most a quarter of the device's blocks are held to be stored

    def __init__(self, num_blocks: int, block_size: int, counts: TierCounts) -> None:
        self.num_blocks = num_blocks
        self.pool = BlockPool(num_blocks + 1, block_size)  # number 0 is none, as block 0 is
        self.counts = counts
        self.is_asked = True  # False: what it holds is computed, which takes less time
        self.storing: set[int] = set()  # hashes of what is on its way to it
        self.num_storing = 0  # blocks on the device that are held for this

    def __len__(self) -> int:
        return self.pool.num_cached

    def find(self, chain: Chain) -> BlockIds:
        """The tier's blocks of the longest prefix of a chain that it holds."""
        cache = self.pool.cache
        return cache.lookup(chain.hashes, chain.token_ids, chain.parent, chain.origins)

    def num_likely(self, chain: Chain) -> int:
        """The number of blocks that `find` finds, unless a hash of theirs collides."""
        return len(self.pool.cache.likely(chain.hashes)) if self.is_asked else 0

    def take(self, num_blocks: int) -> BlockIds:
        """Hands out blocks, of which so many are free, to be stored to."""
        return self.pool.take(num_blocks)

    def touch(self, blocks: BlockIds) -> None:
        """Counts blocks as used now."""
        self.pool.share(blocks)
        self.pool.release(blocks)

    def stored(self, blocks: BlockIds, chain: Chain) -> None:
        """Lets blocks, which were taken for this, be found by what was stored in them."""
        if len(chain):
            self._insert(blocks[: len(chain)], chain)
        self.pool.release(blocks)
        for block in blocks[len(chain) :]:
            self.pool.discard(block)

    def _insert(self, blocks: BlockIds, chain: Chain) -> None:
        named = np.array(blocks, dtype=np.int32)
        self.pool.cache.insert(named, chain.hashes, chain.parents, chain.rows, chain.origins)

    def forget(self, block: int) -> None:
        """Forgets what a block holds, since it is not what the index says."""
        self.pool.cache.evict(block)

    def clear(self) -> None:
        """Forgets all contents."""
        self.pool.forget_contents()
