"""Drives the transfers of one stream: sends the core's orders, tells it the answers, and measures.

A worker that does not answer a transfer which was cancelled is one that hangs, as with a step.
"""

import time
from collections.abc import Callable
from dataclasses import replace

from pagewire.v1 import worker_pb2
from scheduler_svc.convert import to_pulls, to_transfers
from scheduler_svc.core import PullOrders, Scheduler
from scheduler_svc.worker.link import WorkerLink
from wire.versions import HOST_TIER

_SHARE_OF_NEWEST = 0.2  # of a measurement in the mean of what a block takes

PeerOf = Callable[[str], worker_pb2.PeerKv | None]  # of a source of pulls; None: it is gone


class TransferTraffic:
    """The transfers of one core over one stream, to and from a tier and from other workers."""

    def __init__(
        self,
        core: Scheduler,
        link: WorkerLink,
        wake: Callable[[], None],
        peer_of: PeerOf = lambda _: None,
    ) -> None:
        self._core = core
        self._link = link
        self._wake = wake
        self._peer_of = peer_of
        self._of_tier, self._of_peers = _BlockTime(), _BlockTime()
        self._pulls: set[int] = set()  # ids that are not answered
        self._cancelled: dict[int, float] = {}  # id to the seconds since the worker was told
        link.on_transfer_done = self._done
        link.s_since_cancel = self._s_since_cancel

    async def send(self) -> None:
        """Sends what the core has ordered, after the steps that it planned before."""
        orders = self._core.transfers.take_transfers(self._of_tier.s)
        if orders is not None:
            self._cancelled |= dict.fromkeys(orders.cancelled_ids, 0.0)
            await self._link.transfer(to_transfers(orders, HOST_TIER))
        pulls = self._core.peer_moves.take_pulls(self._of_peers.s)
        if pulls is not None:
            await self._pull(pulls)

    async def _pull(self, orders: PullOrders) -> None:
        self._cancelled |= dict.fromkeys(orders.cancelled_ids, 0.0)
        found = {source: self._peer_of(source) for source in {one.source for one in orders.pulls}}
        peers = {source: peer for source, peer in found.items() if peer is not None}
        for pull in orders.pulls:
            if pull.source in peers:
                self._pulls.add(pull.transfer_id)
            else:  # it has gone since
                self._core.peer_moves.pull_done(pull.transfer_id, 0)
        made = tuple(pull for pull in orders.pulls if pull.source in peers)
        await self._link.transfer(to_pulls(replace(orders, pulls=made), peers))

    def _s_since_cancel(self, elapsed_s: float) -> float:
        for transfer_id in self._cancelled:
            self._cancelled[transfer_id] += elapsed_s
        return max(self._cancelled.values(), default=0.0)

    def _done(self, answer: worker_pb2.TransferDone) -> None:
        transfer_id = answer.transfer_id
        self._cancelled.pop(transfer_id, None)
        self._core.now_s = time.monotonic()
        if transfer_id in self._pulls:
            self._pulls.discard(transfer_id)
            self._of_peers.measure(answer)
            self._core.peer_moves.pull_done(transfer_id, answer.num_blocks)
        else:
            self._of_tier.measure(answer)
            self._core.transfers.transfer_done(transfer_id, answer.num_blocks)
        self._wake()


class _BlockTime:
    """The mean of what one block took lately."""

    def __init__(self) -> None:
        self.s = 0.0  # 0: none was measured

    def measure(self, answer: worker_pb2.TransferDone) -> None:
        """Counts a transfer in, if blocks came."""
        if answer.num_blocks:
            s_per_block = answer.duration_us / 1e6 / answer.num_blocks
            share = _SHARE_OF_NEWEST if self.s else 1.0
            self.s += share * (s_per_block - self.s)
