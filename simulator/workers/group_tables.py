"""The block tables of one KV group, as a worker without tensors keeps and checks them."""

import numpy as np
from numpy.typing import NDArray

from scheduler_svc.core import KvGroup
from simulator.workers.host_blocks import InconsistentStep
from wire.columns import unpack


class GroupTables:
    """One table per slot."""

    def __init__(self, group: KvGroup, max_num_seqs: int, max_model_len: int) -> None:
        self._group = group
        # Unused rows take address space, not memory.
        max_blocks = -(-max_model_len // group.block_size)
        self.block_ids = np.zeros((max_num_seqs, max_blocks), dtype=np.int32)
        self.num_blocks = np.zeros(max_num_seqs, dtype=np.int64)

    def enter(self, slot: int, block_ids: NDArray[np.integer], num_computed: int) -> None:
        """Sets a slot's table. Raises InconsistentStep if it has a null block that is read."""
        if not block_ids[self._group.num_null(num_computed) :].all():
            raise InconsistentStep("block_ids: the null block stands where tokens are read")
        self.block_ids[slot] = 0
        self.block_ids[slot, : len(block_ids)] = block_ids
        self.num_blocks[slot] = len(block_ids)

    def append(self, slots: bytes, block_ids: bytes) -> None:
        """Appends a block to the table of each slot."""
        appended = unpack(slots, name="appended_slots").tolist()
        gained = unpack(block_ids, name="appended_block_ids").tolist()
        for slot, block_id in zip(appended, gained, strict=True):
            self.block_ids[slot, self.num_blocks[slot]] = block_id
            self.num_blocks[slot] += 1

    def check_room(self, slots: NDArray[np.integer], num_tokens: NDArray[np.integer]) -> None:
        """Raises InconsistentStep unless each slot's table holds so many tokens."""
        if (num_tokens > self.num_blocks[slots] * self._group.block_size).any():
            raise InconsistentStep("num_scheduled: a row's block table is too short")
