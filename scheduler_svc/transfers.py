"""Drives the transfers of one stream: sends the core's orders, tells it the answers, and measures.

A worker that does not answer a transfer which was cancelled is one that hangs, as with a step.
"""

import time
from collections.abc import Callable

from pagewire.v1 import worker_pb2
from scheduler_svc.convert import to_transfers
from scheduler_svc.core import Scheduler
from scheduler_svc.worker.link import WorkerLink
from wire.versions import HOST_TIER

_SHARE_OF_NEWEST = 0.2  # of a measurement in the mean of what a block takes


class TransferTraffic:
    """The transfers of one core over one stream."""

    def __init__(self, core: Scheduler, link: WorkerLink, wake: Callable[[], None]) -> None:
        self._core = core
        self._link = link
        self._wake = wake
        self._s_per_block = 0.0  # 0: none was measured
        self._cancelled: dict[int, float] = {}  # id to the seconds since the worker was told
        link.on_transfer_done = self._done
        link.s_since_cancel = self._s_since_cancel

    async def send(self) -> None:
        """Sends what the core has ordered, after the steps that it planned before."""
        orders = self._core.transfers.take_transfers(self._s_per_block)
        if orders is not None:
            self._cancelled |= dict.fromkeys(orders.cancelled_ids, 0.0)
            await self._link.transfer(to_transfers(orders, HOST_TIER))

    def _s_since_cancel(self, elapsed_s: float) -> float:
        for transfer_id in self._cancelled:
            self._cancelled[transfer_id] += elapsed_s
        return max(self._cancelled.values(), default=0.0)

    def _done(self, answer: worker_pb2.TransferDone) -> None:
        self._cancelled.pop(answer.transfer_id, None)
        if answer.num_blocks:
            s_per_block = answer.duration_us / 1e6 / answer.num_blocks
            share = _SHARE_OF_NEWEST if self._s_per_block else 1.0
            self._s_per_block += share * (s_per_block - self._s_per_block)
        self._core.now_s = time.monotonic()
        self._core.transfers.transfer_done(answer.transfer_id, answer.num_blocks)
        self._wake()
