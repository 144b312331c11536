"""A tier in memory of the host: blocks of the KV cache by content, copied apart from the steps.

The scheduler knows what the tier holds and names its blocks; this module owns the bytes, keeps the
key that each came with, and gives out nothing whose key is another. On CUDA the threads launch the
copies on streams of their own: a step meanwhile waits for nothing but the memory that both need.
That is safe since no step touches a block before the transfer that fills it is answered, or changes
one that is stored.
"""

import numpy as np
import torch

from worker_svc.attention.kv_cache import PagedCache
from worker_svc.protocol.transfers import Keys, TransferOrder
from worker_svc.runner.block_mover import BLOCKS_AT_ONCE, BlockMover
from worker_svc.runner.copy_lane import CopyLane
from worker_svc.runner.tier_copies import CANCELLED, IsCancelled, TierCopies, moves_of


class HostTier(TierCopies):
    """The blocks of the tier, numbered from 1."""

    def __init__(self, kv_cache: PagedCache, num_blocks: int, device: torch.device) -> None:
        mover = BlockMover(kv_cache, num_blocks, device)
        super().__init__(mover.block_bytes, "host")
        self._keys: Keys = np.zeros((num_blocks + 1, 2), dtype=np.uint64)
        self._holds = np.zeros(num_blocks + 1, dtype=np.bool_)
        self._fetching, self._storing = CopyLane(mover, device), CopyLane(mover, device)

    def copy(self, order: TransferOrder, is_cancelled: IsCancelled) -> tuple[int, str]:
        """Copies the blocks of a transfer; returns how many, and why not all of them."""
        num_blocks, problem = len(order.block_ids), ""
        lane = self._fetching if order.is_fetch else self._storing
        if order.is_fetch:
            num_blocks, problem = self._num_known(order)
        else:
            self._holds[order.tier_blocks] = False
        num_copied, is_stopped = 0, False
        try:
            while num_copied < num_blocks and not (is_stopped := is_cancelled()):
                part = slice(num_copied, min(num_copied + BLOCKS_AT_ONCE, num_blocks))
                places = order.tier_blocks[part] - 1
                lane.copy(moves_of(order.block_ids[part], places, is_fetch=order.is_fetch))
                num_copied = part.stop
        finally:
            lane.finish()  # nothing may still be written once there is an answer
        if not order.is_fetch:
            stored = order.tier_blocks[:num_copied]
            self._keys[stored], self._holds[stored] = order.keys[:num_copied], True
        return num_copied, CANCELLED if is_stopped else problem

    def _num_known(self, order: TransferOrder) -> tuple[int, str]:
        """The blocks of a fetch up to the first one that the tier does not hold; and why."""
        is_it = (self._keys[order.tier_blocks] == order.keys).all(axis=1)
        is_it &= self._holds[order.tier_blocks]
        if is_it.all():
            return len(is_it), ""
        num_known = int(is_it.argmin())
        block = order.tier_blocks[num_known]
        return num_known, f"block {block} of the tier holds another content"
