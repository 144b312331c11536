"""Transfers between a worker group's device and its tiers, as the shell sees them.

The shell takes the orders, sends them between the steps, and tells each answer. No answer is needed
for the core to go on: a fetch that takes too long is cancelled, and its sequences compute.
"""

from scheduler_svc.core.kv.chain import Keys
from scheduler_svc.core.kv.tier import Tier, TierCounts, TierName
from scheduler_svc.core.kv.transfers import TransferOrders
from scheduler_svc.core.step.state import SchedulerState


class Transfers:
    """Orders out, answers in."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state

    @property
    def counts(self) -> TierCounts:
        """Totals of the host tier since start."""
        return self._state.transfer_counts.of[TierName.HOST]

    @property
    def disk_counts(self) -> TierCounts:
        """Totals of the disk tier since start."""
        return self._state.transfer_counts.of[TierName.DISK]

    @property
    def num_in_flight(self) -> int:
        """Number of transfers that were ordered and not answered."""
        return 0 if self._state.transfers is None else len(self._state.transfers)

    @property
    def num_tier_blocks(self) -> int:
        """Blocks of the host tier; 0: there is none."""
        return sum(tier.num_blocks for tier in self._tiers(TierName.HOST))

    @property
    def num_held_tier_blocks(self) -> int:
        """Blocks of the host tier in which a prefix can be found."""
        return sum(map(len, self._tiers(TierName.HOST)))

    @property
    def num_disk_blocks(self) -> int:
        """Blocks that the disk tier has room for; 0: there is none."""
        return sum(tier.num_blocks for tier in self._tiers(TierName.DISK))

    @property
    def num_held_disk_blocks(self) -> int:
        """Blocks of the disk tier in which a prefix can be found."""
        return sum(map(len, self._tiers(TierName.DISK)))

    def _tiers(self, name: TierName) -> list[Tier]:
        """The tier of this name, if there is one."""
        transfers = self._state.transfers
        return [] if transfers is None else [t for t in transfers.tiers if t.name is name]

    @property
    def next_due_s(self) -> float | None:
        """The earliest time at which a fetch has taken too long; None when none is awaited."""
        return None if self._state.transfers is None else self._state.transfers.next_due_s

    def take_transfers(
        self, s_per_block: float = 0.0, s_per_disk_block: float = 0.0
    ) -> TransferOrders | None:
        """Returns what the worker should copy, or need not any more; None: nothing new.

        Each number is what a block of a tier took lately, in seconds; 0: none was measured. The
        worker answers each transfer with `transfer_done`.
        """
        if (transfers := self._state.transfers) is None:
            return None
        took_s = {TierName.HOST: s_per_block, TierName.DISK: s_per_disk_block}
        return transfers.take(self._state.now_s, took_s)

    def ask_disk(self, is_asked: bool) -> None:
        """Has what the disk holds fetched from now on, or computed, which takes less time."""
        for tier in self._tiers(TierName.DISK):
            tier.is_asked = is_asked

    def hear_disk(self, keys: Keys) -> None:
        """Lets contents [n, 2] be found that the worker's disk holds, by what it says."""
        if self._state.transfers is not None and self._state.transfers.disk is not None:
            self._state.transfers.disk.hear(keys)

    def transfer_done(self, transfer_id: int, num_blocks: int) -> None:
        """Uses the first `num_blocks` of a transfer's blocks, and queues who waited for them."""
        if self._state.transfers is not None:
            is_whole = self._state.transfers.done(transfer_id, num_blocks)
            self._state.queue_fetched((transfer_id,), may_repeat=is_whole)

    def expire(self) -> None:
        """Cancels the fetches that have taken too long; their sequences compute instead."""
        transfers = self._state.transfers
        if transfers is None or not (overdue := transfers.overdue(self._state.now_s)):
            return
        for transfer_id in overdue:
            transfers.cancel(transfer_id)
        self._state.queue_fetched(overdue)
