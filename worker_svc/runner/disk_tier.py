"""A tier of files on the worker's host: blocks of the KV cache that outlive the process.

Blocks are stored from the device, not from the host tier: so either tier works without the other,
and a block is on the disk before host memory has dropped it. They pass through a little host memory
of each direction, in parts; several threads read or write the files of a part.
"""

import errno
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import torch

from worker_svc.attention.kv_cache import PagedCache
from worker_svc.protocol.step import IntColumn
from worker_svc.protocol.transfers import DropOrder, Keys, TransferOrder
from worker_svc.runner.block_files import BlockFiles, Full, NamedBlock, names_of
from worker_svc.runner.block_mover import BlockMover
from worker_svc.runner.copy_lane import CopyLane
from worker_svc.runner.tier_copies import CANCELLED, IsCancelled, TierCopies, moves_of

log = logging.getLogger(__name__)

_AT_ONCE = 8  # blocks of a part
_NUM_THREADS = 4  # which read or write files, of each direction
# After these a disk is not written any more: it is full, broken, or may not be written.
_LASTING = frozenset(
    (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EACCES, errno.ENOTDIR)
)


class DiskTier(TierCopies):
    """The files of a folder, as blocks by key."""

    def __init__(self, kv_cache: PagedCache, files: BlockFiles, device: torch.device) -> None:
        self._fetching = _Staging(kv_cache, device, "disk-read")
        self._storing = _Staging(kv_cache, device, "disk-write")
        super().__init__(self._fetching.mover.block_bytes, "disk")
        self._files = files
        self.why_not_written = ""  # empty: it is written

    @property
    def num_blocks(self) -> int:
        """Blocks that it holds."""
        return len(self._files)

    def tell(self, tell: Callable[[Keys], None]) -> None:
        """Tells the keys [n, 2] of what it holds, the one used longest ago first."""
        try:
            tell(self._files.open())
        except OSError as error:
            self._stop_writing(error)

    def drop(self, order: DropOrder) -> None:
        """Removes contents, after what was submitted before."""
        if order.is_all:
            self.stores.post(self._files.remove_all)
        else:
            self.stores.post(partial(self._files.remove, names_of(order.keys)))

    def copy(self, order: TransferOrder, is_cancelled: IsCancelled) -> tuple[int, str]:
        """Copies the blocks of a transfer; returns how many, and why not all of them."""
        copy_part = self._fetch if order.is_fetch else self._store
        num_copied, num_blocks = 0, len(order.block_ids)
        while num_copied < num_blocks:
            if is_cancelled():
                return num_copied, CANCELLED
            part = slice(num_copied, min(num_copied + _AT_ONCE, num_blocks))
            num_whole, problem = copy_part(order, part)
            num_copied += num_whole
            if problem:
                return num_copied, problem
        return num_copied, ""

    def _fetch(self, order: TransferOrder, part: slice) -> tuple[int, str]:
        staging, blocks = self._fetching, _blocks(order, part)
        is_whole = [*staging.threads.map(self._files.read, blocks, staging.rows), False]
        num_whole = is_whole.index(False)
        staging.copy(order.block_ids[part][:num_whole], is_fetch=True)
        if num_whole == len(blocks):
            return num_whole, ""
        return num_whole, f"there is no block {blocks[num_whole].name}"

    def _store(self, order: TransferOrder, part: slice) -> tuple[int, str]:
        if self.why_not_written:
            return 0, self.why_not_written
        staging, blocks = self._storing, _blocks(order, part)
        staging.copy(order.block_ids[part], is_fetch=False)
        problems = [*staging.threads.map(self._problem, blocks, staging.rows), "end"]
        num_whole = next(index for index, problem in enumerate(problems) if problem)
        return num_whole, "" if num_whole == len(blocks) else problems[num_whole]

    def _problem(self, block: NamedBlock, payload: memoryview) -> str:
        """Writes a block; returns why that failed, or nothing."""
        try:
            self._files.write(block, payload)
        except Full as error:
            return str(error)
        except OSError as error:
            if error.errno in _LASTING:
                self._stop_writing(error)
            else:
                self.log_once(str(error))
            return str(error)
        return ""

    def _stop_writing(self, error: OSError) -> None:
        if not self.why_not_written:
            self.why_not_written = f"the disk tier is not written any more: {error}"
            log.error("%s; it is still read", self.why_not_written)


class _Staging:
    """Host memory of one direction, through which parts of transfers pass."""

    def __init__(self, kv_cache: PagedCache, device: torch.device, name: str) -> None:
        self.mover = BlockMover(kv_cache, _AT_ONCE, device)
        self.threads = ThreadPoolExecutor(_NUM_THREADS, name)
        whole, size = self.mover.host_bytes(_AT_ONCE), self.mover.block_bytes
        self.rows = [whole[size * row : size * (row + 1)] for row in range(_AT_ONCE)]
        self._lane = CopyLane(self.mover, device)

    def copy(self, block_ids: IntColumn, *, is_fetch: bool) -> None:
        """Copies between the first rows and blocks of the cache; returns when it is done."""
        if len(block_ids):
            places = np.arange(len(block_ids), dtype=np.int64)
            try:
                self._lane.copy(moves_of(block_ids, places, is_fetch=is_fetch))
            finally:
                self._lane.finish()


def _blocks(order: TransferOrder, part: slice) -> list[NamedBlock]:
    pairs = zip(order.keys[part].tolist(), order.contents[part], strict=True)
    return [NamedBlock(block_hash, check, content) for (block_hash, check), content in pairs]
