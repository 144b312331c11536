"""Host memory between the cache and a connection: a few whole blocks at a time.

Each instance belongs to one thread. What it reads no step changes, and what it writes no step
touches, until the transfer is answered.
"""

import math

import numpy as np
import torch

from worker_svc.attention.kv_cache import PagedCache
from worker_svc.protocol.step import IntColumn, StepMoves, no_entries
from worker_svc.runner.block_mover import BlockMover
from worker_svc.runner.copy_lane import CopyLane

AT_ONCE = 16  # blocks; of an 8B model in bfloat16 36 MiB


def block_bytes(cache: PagedCache) -> int:
    """Bytes of one block of a cache, in all layers."""
    return math.prod(cache.block_shape) * cache.moved_dtype.itemsize


class Staging:
    """Room for `AT_ONCE` blocks."""

    def __init__(self, cache: PagedCache, device: torch.device) -> None:
        self._mover = BlockMover(cache, AT_ONCE, device)
        self._lane = CopyLane(self._mover, device)

    def read(self, block_ids: IntColumn) -> memoryview:
        """The bytes of up to `AT_ONCE` blocks, valid until the next call."""
        places, none = np.arange(len(block_ids)), no_entries()
        self._copy(StepMoves(block_ids, places, none, none, none, none))
        return self.room(len(block_ids))

    def room(self, num_blocks: int) -> memoryview:
        """Memory for the bytes of so many blocks, which `write` takes from it."""
        return self._mover.host_bytes(num_blocks)

    def write(self, block_ids: IntColumn) -> None:
        """Copies the blocks in `room` to these of the cache; returns when they are there."""
        places, none = np.arange(len(block_ids)), no_entries()
        self._copy(StepMoves(none, none, places, block_ids, none, none))

    def _copy(self, moves: StepMoves) -> None:
        try:
            self._lane.copy(moves)
        finally:
            self._lane.finish()
