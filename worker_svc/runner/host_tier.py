"""A tier in memory of the host: blocks of the KV cache by content, copied apart from the steps.

The scheduler knows what the tier holds and names its blocks; this module owns the bytes, keeps the
key that each came with, and gives out nothing whose key is another. Two threads make the copies of
either direction, in the order in which they were asked for. On CUDA they launch them on streams of
their own: a step meanwhile waits for nothing but the memory that both need. That is safe since no
step touches a block before the transfer that fills it is answered, or changes one that is stored.
"""

import logging
import threading
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from worker_svc.attention.kv_cache import PagedCache
from worker_svc.process.compute_thread import ComputeThread
from worker_svc.protocol.step import StepMoves, no_entries
from worker_svc.protocol.transfers import Keys, TransferEnd, TransferOrder
from worker_svc.runner.block_mover import BLOCKS_AT_ONCE, BlockMover
from worker_svc.runner.copy_lane import CopyLane

log = logging.getLogger(__name__)


class HostTier:
    """The blocks of the tier, numbered from 1."""

    def __init__(self, kv_cache: PagedCache, num_blocks: int, device: torch.device) -> None:
        self._mover = BlockMover(kv_cache, num_blocks, device)
        self._keys: Keys = np.zeros((num_blocks + 1, 2), dtype=np.uint64)
        self._holds = np.zeros(num_blocks + 1, dtype=np.bool_)
        # Those that a sequence waits for do not wait for the others.
        self._fetches = ComputeThread("fetches"), CopyLane(self._mover, device)
        self._stores = ComputeThread("stores"), CopyLane(self._mover, device)
        self._lock = threading.Lock()
        self._open: set[int] = set()  # ids that are not answered
        self._cancelled: set[int] = set()  # of these
        self._failures: set[str] = set()  # that were logged

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self._mover.block_bytes

    def submit(
        self,
        order: TransferOrder,
        is_over: Callable[[], bool],
        answer: Callable[[int, TransferEnd], None],
    ) -> None:
        """Queues a transfer; `answer` is called once, from a thread of the tier.

        It ends early once `is_over` says so.
        """
        with self._lock:
            self._open.add(order.transfer_id)
        thread, lane = self._fetches if order.is_fetch else self._stores
        thread.post(partial(self._run, lane, order, is_over, answer, time.perf_counter()))

    def cancel(self, transfer_ids: tuple[int, ...]) -> None:
        """Ends transfers early; those that are answered already are none."""
        with self._lock:
            self._cancelled |= self._open.intersection(transfer_ids)

    def when_done(self, call: Callable[[], None]) -> None:
        """Calls once all transfers that were submitted have ended."""
        self._fetches[0].post(partial(self._stores[0].post, call))

    def _run(
        self,
        lane: CopyLane,
        order: TransferOrder,
        is_over: Callable[[], bool],
        answer: Callable[[int, TransferEnd], None],
        asked_s: float,
    ) -> None:
        begun_s = time.perf_counter()

        def is_cancelled() -> bool:
            return is_over() or order.transfer_id in self._cancelled

        num_whole = 0
        try:
            num_whole, problem = self._copy(lane, order, is_cancelled)
        except Exception as error:  # what is not whole is computed
            problem = f"{type(error).__name__}: {error}"
            if problem not in self._failures:
                self._failures.add(problem)
                log.exception("a transfer failed")
        with self._lock:
            self._open.discard(order.transfer_id)
            self._cancelled.discard(order.transfer_id)
        num_bytes = num_whole * self.block_bytes
        duration_s, queued_s = time.perf_counter() - begun_s, begun_s - asked_s
        answer(order.transfer_id, TransferEnd(num_whole, problem, num_bytes, duration_s, queued_s))

    def _copy(
        self, lane: CopyLane, order: TransferOrder, is_cancelled: Callable[[], bool]
    ) -> tuple[int, str]:
        """Copies the blocks of a transfer; returns how many, and why not all of them."""
        num_blocks, problem = len(order.block_ids), ""
        if order.is_fetch:
            num_blocks, problem = self._num_known(order)
        else:
            self._holds[order.tier_blocks] = False
        num_copied = 0
        try:
            while num_copied < num_blocks and not (is_stopped := is_cancelled()):
                part = slice(num_copied, min(num_copied + BLOCKS_AT_ONCE, num_blocks))
                lane.copy(_moves(order, part))
                num_copied = part.stop
        finally:
            lane.finish()  # nothing may still be written once there is an answer
        if not order.is_fetch:
            stored = order.tier_blocks[:num_copied]
            self._keys[stored], self._holds[stored] = order.keys[:num_copied], True
        if num_copied < num_blocks and is_stopped:
            problem = "it was cancelled"
        return num_copied, problem

    def _num_known(self, order: TransferOrder) -> tuple[int, str]:
        """The blocks of a fetch up to the first one that the tier does not hold; and why."""
        is_it = (self._keys[order.tier_blocks] == order.keys).all(axis=1)
        is_it &= self._holds[order.tier_blocks]
        if is_it.all():
            return len(is_it), ""
        num_known = int(is_it.argmin())
        block = order.tier_blocks[num_known]
        return num_known, f"block {block} of the tier holds another content"


def _moves(order: TransferOrder, part: slice) -> StepMoves:
    block_ids, places, none = order.block_ids[part], order.tier_blocks[part] - 1, no_entries()
    if order.is_fetch:
        return StepMoves(none, none, places, block_ids, none, none)
    return StepMoves(block_ids, places, none, none, none, none)
