"""Transfers of whole blocks between the device and a tier: what is in flight, and what came of it.

A transfer runs apart from the steps. The blocks that it reads are held until it is answered, and so
are those that it fills: none of them can be found, or belong to a sequence, before the worker has
said that no byte of it will be written any more. So an answer may be late, tell of a part, or be of
a transfer that no sequence awaits; a second answer, or one of a lost worker's transfer, is void.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from scheduler_svc.core.kv.block_pool import BlockPool
from scheduler_svc.core.kv.chain import BlockIds, Chain, Keys
from scheduler_svc.core.kv.prefix_cache import BlockKeys
from scheduler_svc.core.kv.tier import Tier
from scheduler_svc.core.request.sequence import Sequence

LEAST_TIMEOUT_S = 1.0
TIMEOUT_FACTOR = 10.0  # of what the copy should take
MAX_TRIES = 2  # transfers that one sequence awaits before it enters
MAX_STORED_SHARE = 4  # at most a quarter of the device's blocks are held to be stored


@dataclass(frozen=True, slots=True)
class BlockTransfer:
    """Blocks to copy from a tier, or to it."""

    transfer_id: int
    block_ids: BlockIds  # on the device
    tier_blocks: BlockIds  # one per block
    keys: Keys  # [n, 2]


@dataclass(frozen=True, slots=True)
class TransferOrders:
    """Orders to the worker about transfers."""

    fetches: tuple[BlockTransfer, ...]
    stores: tuple[BlockTransfer, ...]
    cancelled_ids: tuple[int, ...]


@dataclass(slots=True)
class TransferCounts:
    """Totals since start, over all workers; none ever goes down."""

    num_ordered: int = 0  # transfers: the last one's id
    num_fetched: int = 0  # blocks that came whole
    num_not_fetched: int = 0  # blocks that did not
    num_stored: int = 0
    num_not_stored: int = 0  # blocks dropped, since too many were on the way, or the copy failed


@dataclass(slots=True, eq=False)
class _InFlight:
    """One transfer that is not answered."""

    order: BlockTransfer
    chain: Chain
    is_fetch: bool
    before: BlockIds  # of a fetch: the blocks on the device that its own follow, held with them
    block_keys: tuple[BlockKeys, ...] = ()
    due_s: float = math.inf
    is_taken: bool = False  # the worker was told
    is_cancelled: bool = False
    is_void: bool = False  # what it brings may not be used

    @property
    def held(self) -> BlockIds:
        """The blocks on the device that it holds, in the sequence's order."""
        return self.before + self.order.block_ids


class KvTransfers:
    """The tier of one worker, and the transfers to it and from it."""

    def __init__(self, pool: BlockPool, tier: Tier, counts: TransferCounts) -> None:
        self.tier = tier
        self.num_held = 0  # blocks on the device, one that two transfers hold counted twice
        self.num_tries: dict[Sequence, int] = {}  # of sequences that have not entered since
        self._pool = pool
        self._counts = counts
        self._in_flight: dict[int, _InFlight] = {}  # by id, in order
        self._fetching: dict[int, int] = {}  # hash of a block that is fetched, to its transfer
        self._storing: set[int] = set()  # hashes
        self._num_storing = 0  # blocks
        self._not_taken: list[int] = []
        self._cancelled: list[int] = []  # to be told to the worker

    # --- orders ----------------------------------------------------------------------------------

    def fetch_of(self, block_hash: int) -> int | None:
        """The transfer that brings a block; None when none does."""
        return self._fetching.get(block_hash)

    def fetch(
        self,
        chain: Chain,
        tier_blocks: BlockIds,
        before: BlockIds,
        block_keys: Iterable[BlockKeys] = (),
    ) -> int:
        """Orders blocks from the tier into new blocks; returns the transfer's id.

        The caller has checked that so many blocks are free.
        """
        self._pool.share(before)
        self.tier.pool.share(tier_blocks)
        order = self._order(self._pool.take(len(chain)), tier_blocks, chain)
        fetch = _InFlight(order, chain, True, before, tuple(block_keys))
        self._fetching.update(dict.fromkeys(chain.hashes, order.transfer_id))
        self._begin(fetch)
        return order.transfer_id

    def store(self, chain: Chain, block_ids: BlockIds) -> None:
        """Orders a chain's blocks to be kept in the tier, which holds those before them.

        What the tier holds, or is on its way there, is not copied again. Where too much is on its
        way, the rest is dropped, and counted.
        """
        found = self.tier.find(chain)
        self.tier.touch(found)
        begin = len(found)
        while begin < len(chain) and chain.hashes[begin] in self._storing:
            begin += 1
        room = min(
            self._pool.num_usable // MAX_STORED_SHARE - self._num_storing, self.tier.pool.num_free
        )
        end = min(len(chain), begin + max(room, 0))
        self._counts.num_not_stored += len(chain) - end
        if begin == end:
            return
        part, stored = chain.part(begin, end), block_ids[begin:end]
        self._pool.share(stored)
        order = self._order(stored, self.tier.pool.take(len(stored)), part)
        self._storing.update(part.hashes)
        self._num_storing += len(stored)
        self._begin(_InFlight(order, part, False, []))

    def _order(self, block_ids: BlockIds, tier_blocks: BlockIds, chain: Chain) -> BlockTransfer:
        self._counts.num_ordered += 1
        return BlockTransfer(self._counts.num_ordered, block_ids, tier_blocks, chain.keys)

    def _begin(self, transfer: _InFlight) -> None:
        transfer_id = transfer.order.transfer_id
        self.num_held += len(transfer.held)
        self._in_flight[transfer_id] = transfer
        self._not_taken.append(transfer_id)

    def take(self, now_s: float, s_per_block: float) -> TransferOrders | None:
        """Returns the orders to the worker for now; None when there are none.

        `s_per_block` is what one block should take: ten times that is waited for a fetch, and at
        least a second.
        """
        if not self._not_taken and not self._cancelled:
            return None
        taken = [self._in_flight[transfer_id] for transfer_id in self._not_taken]
        for transfer in taken:
            expected_s = len(transfer.chain) * s_per_block
            transfer.is_taken = True
            if transfer.is_fetch:
                transfer.due_s = now_s + max(TIMEOUT_FACTOR * expected_s, LEAST_TIMEOUT_S)
        cancelled, self._cancelled, self._not_taken = tuple(self._cancelled), [], []
        return TransferOrders(
            tuple(transfer.order for transfer in taken if transfer.is_fetch),
            tuple(transfer.order for transfer in taken if not transfer.is_fetch),
            cancelled,
        )

    # --- ends ------------------------------------------------------------------------------------

    def done(self, transfer_id: int, num_blocks: int) -> None:
        """Ends a transfer whose first `num_blocks` are whole; no effect if it is not in flight."""
        transfer = self._in_flight.pop(transfer_id, None)
        if transfer is None:
            return
        if transfer_id in self._cancelled:  # the worker need not hear of it any more
            self._cancelled.remove(transfer_id)
        whole = transfer.chain.part(0, 0 if transfer.is_void else num_blocks)
        (self._fetched if transfer.is_fetch else self._stored)(transfer, whole)
        release = self._pool.release_filled if transfer.is_fetch else self._pool.release
        release(transfer.held)
        self.num_held -= len(transfer.held)

    def _fetched(self, fetch: _InFlight, whole: Chain) -> None:
        order, num_lacking = fetch.order, len(fetch.chain) - len(whole)
        self._end_waits(fetch)
        if len(whole):
            block_ids = np.array(order.block_ids[: len(whole)], dtype=np.int32)
            self._pool.cache.insert(
                block_ids,
                whole.hashes,
                whole.parents,
                whole.rows,
                whole.origins,
                fetch.block_keys[: len(whole)],
            )
        self.tier.pool.release(order.tier_blocks)
        if num_lacking and not (fetch.is_cancelled or fetch.is_void):
            self.tier.forget(order.tier_blocks[len(whole)])
        self._counts.num_fetched += len(whole)
        self._counts.num_not_fetched += num_lacking

    def _stored(self, store: _InFlight, whole: Chain) -> None:
        self._storing.difference_update(store.chain.hashes)
        self._num_storing -= len(store.chain)
        self.tier.stored(store.order.tier_blocks, whole)
        self._counts.num_stored += len(whole)
        self._counts.num_not_stored += len(store.chain) - len(whole)

    def overdue(self, now_s: float) -> list[int]:
        """The fetches that have taken too long."""
        return [
            transfer_id
            for transfer_id, transfer in self._in_flight.items()
            if transfer.due_s <= now_s and not transfer.is_cancelled
        ]

    @property
    def next_due_s(self) -> float | None:
        """The earliest time at which a fetch has taken too long; None when none is awaited."""
        due = (t.due_s for t in self._in_flight.values() if not t.is_cancelled)
        first_s = min(due, default=math.inf)
        return first_s if first_s < math.inf else None

    def cancel(self, transfer_id: int) -> None:
        """Asks the worker to end a transfer soon; its blocks are held until the answer."""
        transfer = self._in_flight.get(transfer_id)
        if transfer is None or transfer.is_cancelled:
            return
        transfer.is_cancelled = True
        self._end_waits(transfer)
        if transfer.is_taken:
            self._cancelled.append(transfer_id)
        else:  # the worker never hears of it
            self._not_taken.remove(transfer_id)
            self.done(transfer_id, 0)

    def _end_waits(self, transfer: _InFlight) -> None:
        """Lets no further sequence await a transfer."""
        for block_hash in transfer.chain.hashes:
            if self._fetching.get(block_hash) == transfer.order.transfer_id:
                del self._fetching[block_hash]

    def cancel_fetches(self, awaited: Iterable[int]) -> None:
        """Cancels the fetches that no sequence awaits."""
        kept = set(awaited)
        for transfer_id in list(self._in_flight):
            if self._in_flight[transfer_id].is_fetch and transfer_id not in kept:
                self.cancel(transfer_id)

    def end_all(self) -> Tier:
        """Ends what is in flight with its stream; returns the tier and what it has held since.

        What was to be stored is not there: the worker may have written a part of it.
        """
        for transfer in self._in_flight.values():
            blocks = transfer.order.tier_blocks
            if transfer.is_fetch:
                self.tier.pool.release(blocks)
            else:
                self.tier.stored(blocks, transfer.chain.part(0, 0))
        return self.tier

    def forget_contents(self) -> None:
        """Forgets what the tier holds, and what is on its way."""
        self.tier.clear()
        for transfer in self._in_flight.values():
            transfer.is_void = True

    @property
    def held(self) -> list[int]:
        """The blocks on the device that transfers hold, each as often as it is held."""
        return [block_id for transfer in self._in_flight.values() for block_id in transfer.held]

    def __len__(self) -> int:
        return len(self._in_flight)
