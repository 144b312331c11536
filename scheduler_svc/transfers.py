"""Drives the transfers of one stream: sends the core's orders, tells it the answers, and measures.

A worker that does not answer a transfer which was cancelled is one that hangs, as with a step. What
a disk takes longer to read than the worker to compute is not fetched; now and then it is tried
again, since a disk is slow at times.
"""

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from pagewire.v1 import worker_pb2
from scheduler_svc.convert import to_pulls, to_transfers
from scheduler_svc.core import PullOrders, Scheduler
from scheduler_svc.core.kv.tier import TierName
from scheduler_svc.worker.link import WorkerLink
from wire.columns import UINT64, unpack
from wire.versions import DISK_TIER

_SHARE_OF_NEWEST = 0.2  # of a measurement in the mean of what a block takes
RETRY_S = 30.0  # after which a disk that was slow is asked again
LEAST_FETCHES = 8  # that are measured before a disk is judged

PeerOf = Callable[[str], worker_pb2.PeerKv | None]  # of a source of pulls; None: it is gone


class TransferTraffic:
    """The transfers of one core over one stream, to and from a tier and from other workers."""

    def __init__(
        self,
        core: Scheduler,
        link: WorkerLink,
        wake: Callable[[], None],
        peer_of: PeerOf = lambda _: None,
        s_per_token: Callable[[], float | None] = lambda: None,
    ) -> None:
        """`s_per_token` says what a token of a prompt takes to compute; None: it is not known."""
        self._core = core
        self._link = link
        self._wake = wake
        self._peer_of = peer_of
        self._s_per_token = s_per_token
        self._of_tiers, self._of_peers = {name: _BlockTime() for name in TierName}, _BlockTime()
        self._pulls: set[int] = set()  # ids that are not answered
        self._ordered: dict[int, tuple[TierName, bool]] = {}  # and whether it is a fetch
        self._cancelled: dict[int, float] = {}  # id to the seconds since the worker was told
        self._slow_since_s: float | None = None  # the disk; None: it is asked
        self._num_measured = 0  # fetches from the disk since it was asked
        link.on_transfer_done = self._done
        link.on_tier_contents = self._hear
        link.s_since_cancel = self._s_since_cancel

    async def send(self) -> None:
        """Sends what the core has ordered, after the steps that it planned before."""
        if self._slow_since_s is not None and time.monotonic() > self._slow_since_s + RETRY_S:
            self._ask_disk(True)
        orders = self._core.transfers.take_transfers(*(took.s for took in self._of_tiers.values()))
        if orders is not None:
            self._cancelled |= dict.fromkeys(orders.cancelled_ids, 0.0)
            self._ordered |= {one.transfer_id: (one.tier, True) for one in orders.fetches}
            self._ordered |= {one.transfer_id: (one.tier, False) for one in orders.stores}
            await self._link.transfer(to_transfers(orders))
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
            self._tier_done(answer)
        self._wake()

    def _tier_done(self, answer: worker_pb2.TransferDone) -> None:
        tier, is_fetch = self._ordered.pop(answer.transfer_id, (TierName.HOST, False))
        # What a disk takes to write says nothing of what it takes to read.
        if is_fetch or tier is TierName.HOST:
            self._of_tiers[tier].measure(answer)
        self._core.transfers.transfer_done(answer.transfer_id, answer.num_blocks)
        if is_fetch and tier is TierName.DISK:
            self._judge_disk()

    def _judge_disk(self) -> None:
        """Asks the disk no more where it takes longer than computing what it holds."""
        self._num_measured += 1
        s_per_token = self._s_per_token()
        if self._num_measured < LEAST_FETCHES or s_per_token is None:
            return
        if self._of_tiers[TierName.DISK].s > s_per_token * self._core.config.block_size:
            self._ask_disk(False)

    def _ask_disk(self, is_asked: bool) -> None:
        self._slow_since_s = None if is_asked else time.monotonic()
        self._num_measured = 0
        if is_asked:
            self._of_tiers[TierName.DISK] = _BlockTime()  # measured anew
        self._core.transfers.ask_disk(is_asked)

    def _hear(self, told: worker_pb2.TierContents) -> None:
        if told.tier != DISK_TIER:
            return
        keys = unpack(told.keys, UINT64, name="tier_contents.keys")
        whole = keys[: len(keys) // 2 * 2].reshape(-1, 2)
        self._core.transfers.hear_disk(whole.astype(np.uint64, copy=False))
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
