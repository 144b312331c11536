"""Blocks that are pulled from another group's worker for one sequence, and those that came.

The receiver's blocks are held until its worker has said that no byte of them will be written any
more; then they belong to the sequence, which enters with them and computes what is after them. The
blocks at the source are lent: a list says which may be given back. An answer may be late, tell of a
part, or be of a pull that its sequence awaits no more; a second answer is void.
"""

import math
from dataclasses import dataclass

from scheduler_svc.core.kv.block_pool import BlockPool
from scheduler_svc.core.kv.chain import BlockIds
from scheduler_svc.core.kv.transfers import LEAST_TIMEOUT_S, TIMEOUT_FACTOR, TransferCounts
from scheduler_svc.core.request.sequence import Sequence


@dataclass(frozen=True, slots=True)
class LentBlocks:
    """Blocks of another group with the KV of a sequence's first tokens, held there for a pull."""

    source: str  # the group's name
    loan_id: int
    block_ids: BlockIds  # in the sequence's order, from its first token on
    num_tokens: int  # whose KV they hold; the last block may be filled in part


@dataclass(frozen=True, slots=True)
class BlockPull:
    """Own blocks to fill from blocks of another group."""

    transfer_id: int
    source: str
    block_ids: BlockIds
    source_block_ids: BlockIds  # one per block


@dataclass(frozen=True, slots=True)
class PullOrders:
    """Orders to the worker about pulls."""

    pulls: tuple[BlockPull, ...]
    cancelled_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Arrived:
    """KV that came for a sequence which has not entered since."""

    num_tokens: int
    shared: BlockIds  # cached blocks that the others follow
    given: BlockIds  # its own


@dataclass(slots=True)
class PullCounts:
    """Totals since start, over all workers; none ever goes down."""

    num_pulled: int = 0  # blocks that came whole
    num_not_pulled: int = 0  # blocks that did not, or for which there was no room


@dataclass(slots=True, eq=False)
class _Pulling:
    """One pull that is not answered."""

    order: BlockPull
    sequence: Sequence
    lent: LentBlocks
    shared: BlockIds
    due_s: float = math.inf
    is_taken: bool = False  # the worker was told
    is_cancelled: bool = False  # what it brings is not used

    @property
    def held(self) -> BlockIds:
        """The blocks that it holds, in the sequence's order."""
        return self.shared + self.order.block_ids


class Pulls:
    """The pulls of one worker."""

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        ids: TransferCounts,
        counts: PullCounts,
        ended: list[LentBlocks],
    ) -> None:
        """Ids are drawn from those of all transfers; loans that may be given back go to `ended`."""
        self._ended = ended
        self._pool = pool
        self._size = block_size
        self._ids = ids
        self._counts = counts
        self._in_flight: dict[int, _Pulling] = {}  # by id, in order
        self._arrived: dict[Sequence, Arrived] = {}
        self._not_taken: list[int] = []
        self._cancelled: list[int] = []  # to be told to the worker

    def __len__(self) -> int:
        return len(self._in_flight)

    @property
    def num_entering(self) -> int:
        """Number of sequences whose KV comes, or has come, and that have not entered."""
        going_on = sum(not pulling.is_cancelled for pulling in self._in_flight.values())
        return going_on + len(self._arrived)

    @property
    def held(self) -> BlockIds:
        """The blocks that pulls and what they brought hold, each as often as it is held."""
        held = [block_id for pulling in self._in_flight.values() for block_id in pulling.held]
        for arrived in self._arrived.values():
            held += arrived.shared + arrived.given
        return held

    def begin(self, sequence: Sequence, lent: LentBlocks, shared: BlockIds) -> int | None:
        """Orders what `lent` holds after the `shared` blocks; None where it does not fit.

        Returns the pull's id. What is not pulled is given back at once.
        """
        wanted = lent.block_ids[len(shared) :]
        room = self._pool.num_free - self._pool.num_free_among(shared)
        if not wanted or len(wanted) > room:
            self._counts.num_not_pulled += len(wanted)
            self._ended.append(lent)
            return None
        self._pool.share(shared)
        self._ids.num_ordered += 1
        transfer_id = self._ids.num_ordered
        order = BlockPull(transfer_id, lent.source, self._pool.take(len(wanted)), wanted)
        self._in_flight[transfer_id] = _Pulling(order, sequence, lent, shared)
        self._not_taken.append(transfer_id)
        return transfer_id

    def take(self, now_s: float, s_per_block: float) -> PullOrders | None:
        """Returns the orders to the worker for now; None when there are none.

        `s_per_block` is what one block should take: ten times that is waited, and at least a
        second.
        """
        if not self._not_taken and not self._cancelled:
            return None
        taken = [self._in_flight[transfer_id] for transfer_id in self._not_taken]
        for pulling in taken:
            expected_s = len(pulling.order.block_ids) * s_per_block
            pulling.is_taken = True
            pulling.due_s = now_s + max(TIMEOUT_FACTOR * expected_s, LEAST_TIMEOUT_S)
        cancelled, self._cancelled, self._not_taken = tuple(self._cancelled), [], []
        return PullOrders(tuple(pulling.order for pulling in taken), cancelled)

    def done(self, transfer_id: int, num_blocks: int) -> None:
        """Ends a pull whose first `num_blocks` are whole; no effect if it is not in flight."""
        pulling = self._in_flight.pop(transfer_id, None)
        if pulling is None:
            return
        if transfer_id in self._cancelled:  # the worker need not hear of it any more
            self._cancelled.remove(transfer_id)
        self._ended.append(pulling.lent)
        block_ids = pulling.order.block_ids
        num_whole = 0 if pulling.is_cancelled else min(num_blocks, len(block_ids))
        self._counts.num_pulled += num_whole
        self._counts.num_not_pulled += len(block_ids) - num_whole
        self._pool.release(block_ids[num_whole:])
        if not num_whole:
            self._pool.release(pulling.shared)
            return
        num_tokens = (len(pulling.shared) + num_whole) * self._size
        self._arrived[pulling.sequence] = Arrived(
            min(num_tokens, pulling.lent.num_tokens), pulling.shared, block_ids[:num_whole]
        )

    def overdue(self, now_s: float) -> list[int]:
        """The pulls that have taken too long."""
        return [
            transfer_id
            for transfer_id, pulling in self._in_flight.items()
            if pulling.due_s <= now_s and not pulling.is_cancelled
        ]

    @property
    def next_due_s(self) -> float | None:
        """The earliest time at which a pull has taken too long; None when none is awaited."""
        due = (one.due_s for one in self._in_flight.values() if not one.is_cancelled)
        first_s = min(due, default=math.inf)
        return first_s if first_s < math.inf else None

    def of_source(self, source: str) -> list[int]:
        """The pulls from a group."""
        return [i for i, pulling in self._in_flight.items() if pulling.lent.source == source]

    def cancel(self, transfer_id: int) -> None:
        """Asks the worker to end a pull soon; its blocks are held until the answer."""
        pulling = self._in_flight.get(transfer_id)
        if pulling is None or pulling.is_cancelled:
            return
        pulling.is_cancelled = True
        if pulling.is_taken:
            self._cancelled.append(transfer_id)
        else:  # the worker never hears of it
            self._not_taken.remove(transfer_id)
            self.done(transfer_id, 0)

    def find(self, sequence: Sequence) -> Arrived | None:
        """The KV that came for a sequence; None when none did."""
        return self._arrived.get(sequence)

    def enter(self, sequence: Sequence, given: BlockIds) -> None:
        """A sequence enters with the `given` blocks of what came for it; the others are freed."""
        arrived = self._arrived.pop(sequence, None)
        if arrived is None:
            return
        self._pool.release(arrived.given[len(given) :])
        self._pool.release(arrived.shared)  # its table shares them by now

    def drop(self, sequence: Sequence) -> None:
        """Forgets a sequence that has left the queue, or does without what came for it."""
        for transfer_id, pulling in list(self._in_flight.items()):
            if pulling.sequence is sequence:
                self.cancel(transfer_id)
        arrived = self._arrived.pop(sequence, None)
        if arrived is not None:
            self._pool.release(arrived.shared + arrived.given)

    def drop_arrived(self, keep: Sequence | None = None) -> bool:
        """Frees what came last and was not entered with; False if there is nothing.

        Blocks of those that wait must not hold up the others. What came for `keep` stays.
        """
        last = next((one for one in reversed(self._arrived) if one is not keep), None)
        if last is not None:
            self.drop(last)
        return last is not None

    @property
    def sequences(self) -> list[Sequence]:
        """The sequences whose KV comes, or has come."""
        coming = [pulling.sequence for pulling in self._in_flight.values()]
        return [*coming, *self._arrived]

    @property
    def num_coming(self) -> int:
        """Number of blocks that will be free once the worker has answered cancelled pulls."""
        return sum(len(one.held) for one in self._in_flight.values() if one.is_cancelled)

    def end_all(self) -> None:
        """Ends what is in flight with its stream."""
        self._ended += [pulling.lent for pulling in self._in_flight.values()]
