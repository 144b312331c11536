"""Copies whole KV blocks: to host memory, back, and between device blocks.

All copies are launched in the order of the device's stream, so a step's rows see their results, and
the host does not wait. The scheduler decides which blocks are copied.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from worker_svc.attention.kv_cache import PagedCache, empty_pages
from worker_svc.device.transfer import upload
from worker_svc.protocol.step import IntColumn, StepMoves

# Blocks copied at a time, through a buffer on the device of that size.
BLOCKS_AT_ONCE = 32


class BlockMover:
    """The KV cache's blocks and the host's."""

    def __init__(self, kv_cache: PagedCache, num_host_blocks: int, device: torch.device) -> None:
        self._kv_cache = kv_cache
        self._device = device
        # A block's layers are contiguous here, so that one copy moves it.
        pages = (num_host_blocks, *kv_cache.block_shape)
        self._host = empty_pages(pages, kv_cache.moved_dtype, device)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, in all layers."""
        return math.prod(self._kv_cache.block_shape) * self._kv_cache.moved_dtype.itemsize

    def host_bytes(self, num_host_blocks: int) -> memoryview:
        """The memory of the first host blocks, as bytes."""
        blocks = self._host[:num_host_blocks].reshape(-1)
        return blocks.view(torch.uint8).numpy().data

    def apply(self, moves: StepMoves) -> None:
        """Swaps out, swaps in, copies; in this order."""
        for blocks, host_blocks in _parts(moves.swapped_out, moves.to_host):
            self._swap_out(blocks, host_blocks)
        for blocks, host_blocks in _parts(moves.swapped_in, moves.from_host):
            self._swap_in(blocks, host_blocks)
        for sources, targets in _parts(moves.copied_from, moves.copied_to):
            index = upload(self._device, sources, targets)
            self._kv_cache.write_blocks(index[1], self._kv_cache.read_blocks(index[0]))

    def _swap_out(self, blocks: IntColumn, host_blocks: IntColumn) -> None:
        (index,) = upload(self._device, blocks)
        content = self._kv_cache.read_blocks(index)  # [n, L, block_size, 2, Hkv, D]
        for run in _runs(host_blocks):
            self._host[run.host].copy_(content[run.part], non_blocking=True)

    def _swap_in(self, blocks: IntColumn, host_blocks: IntColumn) -> None:
        (index,) = upload(self._device, blocks)
        content = self._buffer(len(blocks))
        for run in _runs(host_blocks):
            content[run.part].copy_(self._host[run.host], non_blocking=True)
        self._kv_cache.write_blocks(index, content)

    def _buffer(self, num_blocks: int) -> Tensor:
        shape = (num_blocks, *self._kv_cache.block_shape)
        return torch.empty(shape, dtype=self._kv_cache.moved_dtype, device=self._device)


@dataclass(frozen=True, slots=True)
class BlockRun:
    """Blocks that follow each other in host memory, so that one copy moves them."""

    part: slice  # of the blocks that are moved
    host: slice


def _runs(host_blocks: IntColumn) -> Iterator[BlockRun]:
    """The runs of the blocks, in their order."""
    begin = 0
    for end in (*(np.flatnonzero(np.diff(host_blocks) != 1) + 1).tolist(), len(host_blocks)):
        first = int(host_blocks[begin])
        yield BlockRun(slice(begin, end), slice(first, first + end - begin))
        begin = end


def _parts(first: IntColumn, second: IntColumn) -> list[tuple[IntColumn, IntColumn]]:
    cuts = np.arange(BLOCKS_AT_ONCE, len(first), BLOCKS_AT_ONCE)
    pairs = zip(np.split(first, cuts), np.split(second, cuts), strict=True)
    return [(some, others) for some, others in pairs if len(some)]
