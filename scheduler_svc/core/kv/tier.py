"""The index of a tier: which contents its blocks hold, in memory that is not the device's.

It handles numbers only; the worker owns the memory and copies the bytes. A block of the tier can be
found once it was stored, keeps its content until it is handed out anew, and is checked by what
blocks on the device are checked by. The block used longest ago is handed out first.
"""

import numpy as np

from scheduler_svc.core.kv.block_pool import BlockPool
from scheduler_svc.core.kv.chain import BlockIds, Chain


class Tier:
    """The blocks of one tier, numbered from 1."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.pool = BlockPool(num_blocks + 1, block_size)  # number 0 is none, as block 0 is

    def __len__(self) -> int:
        return self.pool.num_cached

    def find(self, chain: Chain) -> BlockIds:
        """The tier's blocks of the longest prefix of a chain that it holds."""
        cache = self.pool.cache
        return cache.lookup(chain.hashes, chain.token_ids, chain.parent, chain.origins)

    def touch(self, blocks: BlockIds) -> None:
        """Counts blocks as used now."""
        self.pool.share(blocks)
        self.pool.release(blocks)

    def stored(self, blocks: BlockIds, chain: Chain) -> None:
        """Lets blocks, which were taken for this, be found by what was stored in them."""
        if len(chain):
            blocks_of_chain = np.array(blocks[: len(chain)], dtype=np.int32)
            self.pool.cache.insert(
                blocks_of_chain, chain.hashes, chain.parents, chain.rows, chain.origins
            )
        self.pool.release(blocks)
        for block in blocks[len(chain) :]:
            self.pool.discard(block)

    def forget(self, block: int) -> None:
        """Forgets what a block holds, since it is not what the index says."""
        self.pool.cache.evict(block)

    def clear(self) -> None:
        """Forgets all contents."""
        self.pool.forget_contents()
