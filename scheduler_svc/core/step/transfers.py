"""Transfers between a worker group's device and its tier, as the shell sees them.

The shell takes the orders, sends them between the steps, and tells each answer. No answer is needed
for the core to go on: a fetch that takes too long is cancelled, and its sequences compute.
"""

from scheduler_svc.core.kv.transfers import TransferCounts, TransferOrders
from scheduler_svc.core.step.state import SchedulerState


class Transfers:
    """Orders out, answers in."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state

    @property
    def counts(self) -> TransferCounts:
        """Totals since start."""
        return self._state.transfer_counts

    @property
    def num_in_flight(self) -> int:
        """Number of transfers that were ordered and not answered."""
        return 0 if self._state.transfers is None else len(self._state.transfers)

    @property
    def num_tier_blocks(self) -> int:
        """Blocks of the tier; 0: there is none."""
        transfers = self._state.transfers
        return 0 if transfers is None else transfers.tier.num_blocks

    @property
    def num_held_tier_blocks(self) -> int:
        """Blocks of the tier in which a prefix can be found."""
        return 0 if self._state.transfers is None else len(self._state.transfers.tier)

    @property
    def next_due_s(self) -> float | None:
        """The earliest time at which a fetch has taken too long; None when none is awaited."""
        return None if self._state.transfers is None else self._state.transfers.next_due_s

    def take_transfers(self, s_per_block: float = 0.0) -> TransferOrders | None:
        """Returns what the worker should copy, or need not any more; None: nothing new.

        `s_per_block` is what a block took lately, in seconds; 0: none was measured. The worker
        answers each transfer with `transfer_done`.
        """
        transfers = self._state.transfers
        return None if transfers is None else transfers.take(self._state.now_s, s_per_block)

    def transfer_done(self, transfer_id: int, num_blocks: int) -> None:
        """Uses the first `num_blocks` of a transfer's blocks, and queues who waited for them."""
        if self._state.transfers is not None:
            self._state.transfers.done(transfer_id, num_blocks)
            self._state.queue_fetched((transfer_id,))

    def expire(self) -> None:
        """Cancels the fetches that have taken too long; their sequences compute instead."""
        transfers = self._state.transfers
        if transfers is None or not (overdue := transfers.overdue(self._state.now_s)):
            return
        for transfer_id in overdue:
            transfers.cancel(transfer_id)
        self._state.queue_fetched(overdue)
