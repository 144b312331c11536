"""The transfers of one tier: two threads make the copies of either direction, in order.

A transfer is answered once, whatever becomes of it, and only when no byte is read or written for it
any more. What fails is an answer with a problem, never a failed step.
"""

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial

from worker_svc.process.compute_thread import ComputeThread
from worker_svc.protocol.step import IntColumn, StepMoves, no_entries
from worker_svc.protocol.transfers import TransferEnd, TransferOrder

log = logging.getLogger(__name__)

CANCELLED = "it was cancelled"
IsCancelled = Callable[[], bool]


class TierCopies(ABC):
    """A tier that copies when it is asked to."""

    def __init__(self, block_bytes: int, name: str) -> None:
        self.block_bytes = block_bytes  # of one block, in all layers
        # Those that a sequence waits for do not wait for the others.
        self.fetches = ComputeThread(f"{name} fetches")
        self.stores = ComputeThread(f"{name} stores")
        self._lock = threading.Lock()
        self._open: set[int] = set()  # ids that are not answered
        self._cancelled: set[int] = set()  # of these
        self._failures: set[str] = set()  # that were logged

    @abstractmethod
    def copy(self, order: TransferOrder, is_cancelled: IsCancelled) -> tuple[int, str]:
        """Copies the blocks of a transfer; returns how many, and why not all of them.

        Called by the thread of its direction. Nothing may still be written when it has returned.
        """

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
        thread = self.fetches if order.is_fetch else self.stores
        thread.post(partial(self._run, order, is_over, answer, time.perf_counter()))

    def cancel(self, transfer_ids: tuple[int, ...]) -> None:
        """Ends transfers early; those that are answered already are none."""
        with self._lock:
            self._cancelled |= self._open.intersection(transfer_ids)

    def when_done(self, call: Callable[[], None]) -> None:
        """Calls once all transfers that were submitted have ended."""
        self.fetches.post(partial(self.stores.post, call))

    def _run(
        self,
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
            num_whole, problem = self.copy(order, is_cancelled)
        except Exception as error:  # what is not whole is computed
            problem = f"{type(error).__name__}: {error}"
            self.log_once(problem)
        with self._lock:
            self._open.discard(order.transfer_id)
            self._cancelled.discard(order.transfer_id)
        num_bytes = num_whole * self.block_bytes
        duration_s, queued_s = time.perf_counter() - begun_s, begun_s - asked_s
        answer(order.transfer_id, TransferEnd(num_whole, problem, num_bytes, duration_s, queued_s))

    def log_once(self, problem: str) -> None:
        """Logs the exception that is being handled, unless one like it was logged."""
        if problem not in self._failures:
            self._failures.add(problem)
            log.exception("a transfer failed")


def moves_of(block_ids: IntColumn, places: IntColumn, *, is_fetch: bool) -> StepMoves:
    """Copies between blocks of the cache and places of host memory."""
    none = no_entries()
    if is_fetch:
        return StepMoves(none, none, places, block_ids, none, none)
    return StepMoves(block_ids, places, none, none, none, none)
