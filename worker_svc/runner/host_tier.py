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
from worker_svc.device.transfer import wait_for
from worker_svc.process.compute_thread import ComputeThread
from worker_svc.protocol.step import IntColumn, StepMoves, no_entries
from worker_svc.protocol.transfers import Keys, TransferEnd, TransferOrder
from worker_svc.runner.block_mover import BLOCKS_AT_ONCE, BlockMover

log = logging.getLogger(__name__)


class HostTier:
    """The blocks of the tier, numbered from 1."""

    def __init__(self, kv_cache: PagedCache, num_blocks: int, device: torch.device) -> None:
        self._mover = BlockMover(kv_cache, num_blocks, device)
        self._keys: Keys = np.zeros((num_blocks + 1, 2), dtype=np.uint64)
        self._holds = np.zeros(num_blocks + 1, dtype=np.bool_)
        # Those that a sequence waits for do not wait for the others.
        self._fetches, self._stores = ComputeThread("fetches"), ComputeThread("stores")
        self._fetch_stream, self._store_stream = _stream_of(device), _stream_of(device)
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
        thread = self._fetches if order.is_fetch else self._stores
        thread.post(partial(self._run, order, is_over, answer, time.perf_counter()))

    def cancel(self, transfer_ids: tuple[int, ...]) -> None:
        """Ends transfers early; those that are answered already are none."""
        with self._lock:
            self._cancelled |= self._open.intersection(transfer_ids)

    def when_done(self, call: Callable[[], None]) -> None:
        """Calls once all transfers that were submitted have ended."""
        self._fetches.post(partial(self._stores.post, call))

    def _run(
        self,
        order: TransferOrder,
        is_over: Callable[[], bool],
        answer: Callable[[int, TransferEnd], None],
        asked_s: float,
    ) -> None:
        begun_s = time.perf_counter()
        num_whole, problem = 0, ""
        try:
            while num_whole < len(order.block_ids) and not problem:
                if is_over() or order.transfer_id in self._cancelled:
                    problem = "it was cancelled"
                else:
                    num_copied, problem = self._copy(order, num_whole)
                    num_whole += num_copied
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

    def _copy(self, order: TransferOrder, begin: int) -> tuple[int, str]:
        """Copies the next blocks of a transfer; returns how many, and why not all of them."""
        part = slice(begin, begin + BLOCKS_AT_ONCE)
        block_ids, tier_blocks = order.block_ids[part], order.tier_blocks[part]
        keys = order.keys[part]
        if not order.is_fetch:
            self._holds[tier_blocks] = False
            self._move(self._store_stream, _to_host(block_ids, tier_blocks - 1))
            self._keys[tier_blocks], self._holds[tier_blocks] = keys, True
            return len(block_ids), ""
        is_it = (self._keys[tier_blocks] == keys).all(axis=1) & self._holds[tier_blocks]
        num_known = len(is_it) if is_it.all() else int(is_it.argmin())
        if num_known:
            known = _from_host(tier_blocks[:num_known] - 1, block_ids[:num_known])
            self._move(self._fetch_stream, known)
        if num_known < len(is_it):
            return num_known, f"block {tier_blocks[num_known]} of the tier holds another content"
        return num_known, ""

    @torch.inference_mode()
    def _move(self, stream: torch.cuda.Stream | None, moves: StepMoves) -> None:
        """Copies blocks; returns when all of their bytes are where they belong."""
        if stream is None:
            self._mover.apply(moves)
            return
        with torch.cuda.stream(stream):
            self._mover.apply(moves)
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
        wait_for(done)


def _stream_of(device: torch.device) -> torch.cuda.Stream | None:
    if device.type != "cuda":
        return None
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _to_host(block_ids: IntColumn, places: IntColumn) -> StepMoves:
    none = no_entries()
    return StepMoves(block_ids, places, none, none, none, none)


def _from_host(places: IntColumn, block_ids: IntColumn) -> StepMoves:
    none = no_entries()
    return StepMoves(none, none, places, block_ids, none, none)
