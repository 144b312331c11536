"""A host tier that only takes time: copies in either direction, one after the other in each."""

from collections import deque

from scheduler_svc.core import BlockTransfer, Scheduler


class VirtualTier:
    """The transfers of one core, which are whole when their time is over."""

    def __init__(self, core: Scheduler, s_per_block: float) -> None:
        self._core = core
        self._s_per_block = s_per_block
        # (seconds when it is done, id, blocks); a later one of a direction is never done before.
        self._fetches: deque[tuple[float, int, int]] = deque()
        self._stores: deque[tuple[float, int, int]] = deque()

    @property
    def next_s(self) -> float | None:
        """The time at which the next copy is done, in seconds; None when none is under way."""
        return min((lane[0][0] for lane in (self._fetches, self._stores) if lane), default=None)

    def take(self, now_s: float) -> None:
        """Begins the copies that the core has ordered. One that is cancelled ends in its time."""
        orders = self._core.transfers.take_transfers(self._s_per_block)
        if orders is not None:
            self._begin(self._fetches, orders.fetches, now_s)
            self._begin(self._stores, orders.stores, now_s)

    def _begin(
        self,
        lane: deque[tuple[float, int, int]],
        transfers: tuple[BlockTransfer, ...],
        now_s: float,
    ) -> None:
        for transfer in transfers:
            begin_s = max(now_s, lane[-1][0]) if lane else now_s
            num_blocks = len(transfer.block_ids)
            done_s = begin_s + num_blocks * self._s_per_block
            lane.append((done_s, transfer.transfer_id, num_blocks))

    def finish(self, now_s: float) -> bool:
        """Tells the core of the copies that are done by now; True if there was one."""
        is_done = False
        for lane in (self._fetches, self._stores):
            while lane and lane[0][0] <= now_s:
                _, transfer_id, num_blocks = lane.popleft()
                self._core.transfers.transfer_done(transfer_id, num_blocks)
                is_done = True
        return is_done
