"""Transfers of whole blocks between the device and its tiers: what is in flight, what came of it.

A transfer runs apart from the steps. The blocks that it reads are held until it is answered, and so
are those that it fills: none of them can be found, or belong to a sequence, before the worker has
said that no byte of it will be written any more. So an answer may be late, tell of a part, or be of
a transfer that no sequence awaits; a second answer, or one of a lost worker's transfer, is void.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from scheduler_svc.core.kv.block_pool import BlockPool
from scheduler_svc.core.kv.chain import BlockIds, Chain, Keys
from scheduler_svc.core.kv.disk_index import DiskIndex, Drops
from scheduler_svc.core.kv.prefix_cache import BlockKeys
from scheduler_svc.core.kv.tier import Tier, TierCounts, TierName
from scheduler_svc.core.request.sequence import Sequence

LEAST_TIMEOUT_S = 1.0
TIMEOUT_FACTOR = 10.0  # of what the copy should take
MAX_TRIES = 2  # transfers from one tier that one sequence awaits before it enters
MAX_REPEATS = 64  # times that it may await them again, since others took what had come


@dataclass(frozen=True, slots=True)
class BlockTransfer:
    """Blocks to copy from a tier, or to it."""

    transfer_id: int
    block_ids: BlockIds  # on the device
    tier_blocks: BlockIds  # one per block
    keys: Keys  # [n, 2]
    tier: TierName = TierName.HOST
    contents: tuple[bytes, ...] = ()  # that the keys are of, where the worker compares them


@dataclass(frozen=True, slots=True)
class TransferOrders:
    """Orders to the worker about transfers."""

    fetches: tuple[BlockTransfer, ...]
    stores: tuple[BlockTransfer, ...]
    cancelled_ids: tuple[int, ...]
    drops: Drops | None = None  # from the disk, before anything is stored


@dataclass(slots=True)
class TransferCounts:
    """Totals since start, over all workers."""

    num_ordered: int = 0  # transfers: the last one's id
    of: dict[TierName, TierCounts] = field(
        default_factory=lambda: {name: TierCounts() for name in TierName}
    )


@dataclass(slots=True, eq=False)
class _InFlight:
    """One transfer that is not answered."""

    tier: Tier
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
    """The tiers of one worker, the fastest first, and the transfers to them and from them."""

    def __init__(self, pool: BlockPool, tiers: tuple[Tier, ...], counts: TransferCounts) -> None:
        self.tiers = tiers
        self.disk = next((tier for tier in tiers if isinstance(tier, DiskIndex)), None)
        self.num_held = 0  # blocks on the device, one that two transfers hold counted twice
        self.num_tries: dict[Sequence, int] = {}  # of sequences that have not entered since
        self.num_repeats: dict[Sequence, int] = {}  # of these
        self._pool = pool
        self._counts = counts
        self._in_flight: dict[int, _InFlight] = {}  # by id, in order
        self._fetching: dict[int, int] = {}  # hash of a block that is fetched, to its transfer
        self._not_taken: list[int] = []
        self._cancelled: list[int] = []  # to be told to the worker

    def num_likely(self, chain: Chain) -> int:
        """Number of a chain's first blocks that the tiers would bring, by their hashes."""
        num_found = 0
        for tier in self.tiers:
            num_found += tier.num_likely(chain.part(num_found, len(chain)))
        return num_found

    # --- orders ----------------------------------------------------------------------------------

    def fetch_of(self, block_hash: int) -> int | None:
        """The transfer that brings a block; None when none does."""
        return self._fetching.get(block_hash)

    def fetch(
        self,
        tier: Tier,
        chain: Chain,
        tier_blocks: BlockIds,
        before: BlockIds,
        block_keys: Iterable[BlockKeys] = (),
    ) -> int:
        """Orders blocks from a tier into new blocks; returns the transfer's id.

        The caller has checked that so many blocks are free.
        """
        self._pool.share(before)
        tier.pool.share(tier_blocks)
        order = self._order(tier, self._pool.take(len(chain)), tier_blocks, chain)
        fetch = _InFlight(tier, order, chain, True, before, tuple(block_keys))
        self._fetching.update(dict.fromkeys(chain.hashes, order.transfer_id))
        self._begin(fetch)
        return order.transfer_id

    def store(self, tier: Tier, chain: Chain, block_ids: BlockIds) -> None:
        """Orders a chain's blocks to be kept in a tier, which holds those before them.

        What the tier holds, or is on its way there, is not copied again. Where too much is on its
        way, the rest is dropped, and counted.
        """
        found = tier.find(chain)
        tier.touch(found)
        begin = len(found)
        while begin < len(chain) and chain.hashes[begin] in tier.storing:
            begin += 1
        most = self._pool.num_usable // tier.max_stored_share - tier.num_storing
        end = min(len(chain), begin + max(min(most, tier.pool.num_free), 0))
        tier.counts.num_not_stored += len(chain) - end
        if begin == end:
            return
        part, stored = chain.part(begin, end), block_ids[begin:end]
        self._pool.share(stored)
        order = self._order(tier, stored, tier.take(len(stored)), part)
        tier.storing.update(part.hashes)
        tier.num_storing += len(stored)
        self._begin(_InFlight(tier, order, part, False, []))

    def _order(
        self, tier: Tier, block_ids: BlockIds, tier_blocks: BlockIds, chain: Chain
    ) -> BlockTransfer:
        self._counts.num_ordered += 1
        number, keys = self._counts.num_ordered, chain.keys
        contents = tuple(chain.contents) if tier is self.disk else ()
        return BlockTransfer(number, block_ids, tier_blocks, keys, tier.name, contents)

    def _begin(self, transfer: _InFlight) -> None:
        transfer_id = transfer.order.transfer_id
        self.num_held += len(transfer.held)
        self._in_flight[transfer_id] = transfer
        self._not_taken.append(transfer_id)

    def take(self, now_s: float, s_per_block: Mapping[TierName, float]) -> TransferOrders | None:
        """Returns the orders to the worker for now; None when there are none.

        `s_per_block` is what one block of each tier should take: ten times that is waited for a
        fetch, and at least a second.
        """
        next_id = min(self._not_taken, default=self._counts.num_ordered + 1)
        drops = None if self.disk is None else self.disk.take_drops(next_id)
        if not self._not_taken and not self._cancelled and drops is None:
            return None
        taken = [self._in_flight[transfer_id] for transfer_id in self._not_taken]
        for transfer in taken:
            expected_s = len(transfer.chain) * s_per_block[transfer.tier.name]
            transfer.is_taken = True
            if transfer.is_fetch:
                transfer.due_s = now_s + max(TIMEOUT_FACTOR * expected_s, LEAST_TIMEOUT_S)
        cancelled, self._cancelled, self._not_taken = tuple(self._cancelled), [], []
        return TransferOrders(
            tuple(transfer.order for transfer in taken if transfer.is_fetch),
            tuple(transfer.order for transfer in taken if not transfer.is_fetch),
            cancelled,
            drops,
        )

    # --- ends ------------------------------------------------------------------------------------

    def done(self, transfer_id: int, num_blocks: int) -> bool:
        """Ends a transfer whose first `num_blocks` are whole; no effect if it is not in flight.

        Returns True if it was, and all has come.
        """
        transfer = self._in_flight.pop(transfer_id, None)
        if transfer is None:
            return False
        if transfer_id in self._cancelled:  # the worker need not hear of it any more
            self._cancelled.remove(transfer_id)
        whole = transfer.chain.part(0, 0 if transfer.is_void else num_blocks)
        (self._fetched if transfer.is_fetch else self._stored)(transfer, whole)
        release = self._pool.release_filled if transfer.is_fetch else self._pool.release
        release(transfer.held)
        self.num_held -= len(transfer.held)
        return len(whole) == len(transfer.chain)

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
        fetch.tier.pool.release(order.tier_blocks)
        if num_lacking and not (fetch.is_cancelled or fetch.is_void):
            fetch.tier.forget(order.tier_blocks[len(whole)])
        fetch.tier.counts.num_fetched += len(whole)
        fetch.tier.counts.num_not_fetched += num_lacking

    def _stored(self, store: _InFlight, whole: Chain) -> None:
        tier = store.tier
        tier.storing.difference_update(store.chain.hashes)
        tier.num_storing -= len(store.chain)
        tier.stored(store.order.tier_blocks, whole)
        if tier is self.disk and self.disk.is_void and not store.is_cancelled:
            self.disk.was_stored(store.order.transfer_id)
        tier.counts.num_stored += len(whole)
        tier.counts.num_not_stored += len(store.chain) - len(whole)

    def may_repeat(self, sequence: Sequence) -> None:
        """Lets a sequence await the tiers again, if all that it awaited has come.

        Others may take it before the sequence can enter, and to copy it once more costs less than
        to compute it. The bound is for safety: each time, others have entered.
        """
        num_repeats = self.num_repeats.get(sequence, 0)
        if sequence in self.num_tries and num_repeats < MAX_REPEATS:
            self.num_repeats[sequence] = num_repeats + 1
            self.num_tries[sequence] = 0

    def forget_tries(self, sequence: Sequence) -> None:
        """Forgets what a sequence has awaited: it has entered, or left."""
        self.num_tries.pop(sequence, None)
        self.num_repeats.pop(sequence, None)

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

    def end_all(self) -> tuple[Tier, ...]:
        """Ends what is in flight with its stream; returns the tiers and what they have held since.

        What was to be stored is not there: the worker may have written a part of it.
        """
        for transfer in self._in_flight.values():
            blocks = transfer.order.tier_blocks
            if transfer.is_fetch:
                transfer.tier.pool.release(blocks)
            else:
                transfer.tier.stored(blocks, transfer.chain.part(0, 0))
        for tier in self.tiers:
            tier.storing.clear()
            tier.num_storing = 0
        if self.disk is not None:
            self.disk.stream_ended()
        return self.tiers

    def forget_contents(self) -> None:
        """Forgets what the tiers hold, and what is on its way."""
        for transfer_id in list(self._not_taken):
            if not self._in_flight[transfer_id].is_fetch:
                self.cancel(transfer_id)  # it would be stored after what is dropped
        for tier in self.tiers:
            tier.clear()
        for transfer in self._in_flight.values():
            transfer.is_void = True

    @property
    def held(self) -> list[int]:
        """The blocks on the device that transfers hold, each as often as it is held."""
        return [block_id for transfer in self._in_flight.values() for block_id in transfer.held]

    def __len__(self) -> int:
        return len(self._in_flight)
