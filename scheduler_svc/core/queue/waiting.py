"""The waiting queue: counts sequences and tokens, in total and per tenant, for any policy.

Sequences that wait for their requirements, or for KV from a tier, count, although no order has
them.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from scheduler_svc.core.queue.policies import Order
from scheduler_svc.core.queue.requirement_waits import RequirementWaits
from scheduler_svc.core.request.sequence import Sequence, Status


@dataclass(slots=True)
class Load:
    """Number of waiting sequences, and of their prompt and output tokens."""

    num_sequences: int = 0
    num_tokens: int = 0

    def add(self, num_sequences: int, num_tokens: int) -> None:
        """Adds to both counts; negative numbers subtract."""
        self.num_sequences += num_sequences
        self.num_tokens += num_tokens


class WaitingQueue:
    """Sequences without a slot. An aborted one is skipped when taken, so that abort is O(1)."""

    def __init__(self, order: Order, requirements: RequirementWaits) -> None:
        self.order = order
        self.requirements = requirements
        # Those that wait for KV, to the transfer of each, or to leave with their own, to the loan.
        self.fetching: dict[Sequence, int] = {}
        self._total = Load()
        self.num_preempted = 0  # of the sequences, those that have lost a slot
        self._by_tenant: dict[str, Load] = {}

    def clear(self, order: Order) -> None:
        """Removes all sequences; from now on they are kept in this order."""
        self.order, self._total = order, Load()
        self.num_preempted = 0
        self._by_tenant.clear()
        self.requirements.clear()
        self.fetching.clear()

    def __len__(self) -> int:
        return self._total.num_sequences

    def __iter__(self) -> Iterator[Sequence]:
        yield from self.order
        yield from self.requirements
        yield from self.fetching

    @property
    def num_admissible(self) -> int:
        """Number of sequences that need nothing but room."""
        return len(self) - len(self.requirements) - len(self.fetching)

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens of all waiting sequences."""
        return self._total.num_tokens

    def load_of(self, tenant: str) -> Load:
        """The waiting load of one tenant."""
        return self._by_tenant.get(tenant) or Load()

    def append(self, sequence: Sequence) -> None:
        """Adds a new sequence."""
        self.order.append(sequence)
        self._count(sequence, 1)

    def put_back(self, sequence: Sequence) -> None:
        """Returns a sequence that did not fit or was preempted."""
        self.order.put_back(sequence)
        self._count(sequence, 1)

    def hold(self, sequence: Sequence) -> None:
        """Adds a sequence that waits for its requirements."""
        self.requirements.hold(sequence)
        self._count(sequence, 1)

    def is_prepared(self, preparation_id: int) -> Sequence | None:
        """Queues the sequence that waited only for this; one that has run goes to the front."""
        sequence = self.requirements.prepared(preparation_id)
        if sequence is not None and sequence.has_run:
            self.order.put_back(sequence)
        elif sequence is not None:
            self.order.append(sequence)
        return sequence

    def await_kv(self, sequence: Sequence, transfer_id: int) -> None:
        """Adds a sequence that waits for a transfer."""
        sequence.status = Status.WAITING_FOR_KV
        self.fetching[sequence] = transfer_id
        self._count(sequence, 1)

    def kv_came(self, transfer_ids: Collection[int]) -> list[Sequence]:
        """Queues the sequences that waited for one of these transfers, at the front."""
        came = [s for s, transfer_id in self.fetching.items() if transfer_id in transfer_ids]
        for sequence in reversed(came):
            self._stop_fetching(sequence)
            self.order.put_back(sequence)
        return came

    def _stop_fetching(self, sequence: Sequence) -> None:
        del self.fetching[sequence]
        sequence.status = Status.PREEMPTED if sequence.has_run else Status.WAITING

    def take_awaiting(self, sequence: Sequence) -> None:
        """Removes a sequence that waits for KV, or to leave with its own."""
        self._stop_fetching(sequence)
        self._count(sequence, -1)

    def take_held(self, staying: Collection[Sequence] = ()) -> list[Sequence]:
        """Removes and returns those that wait for their requirements, or for KV, but for some."""
        held = [*self.requirements, *(one for one in self.fetching if one not in staying)]
        for sequence in held:
            if sequence in self.fetching:
                self._stop_fetching(sequence)
            self.requirements.discard(sequence)
            self._count(sequence, -1)
        return held

    def take(self) -> Sequence | None:
        """Removes and returns the next admissible sequence; None when there is none."""
        sequence = self.order.take()
        if sequence is not None:
            self._count(sequence, -1)
        return sequence

    def peek(self) -> Sequence | None:
        """The next sequence, which stays in the queue; None when it is empty."""
        sequence = self.order.take()
        if sequence is not None:
            self.order.put_back(sequence)
        return sequence

    def discard(self, sequence: Sequence) -> None:
        """Removes a sequence from the counts; its status must be FINISHED already."""
        assert sequence.status is Status.FINISHED
        self.requirements.discard(sequence)
        self.fetching.pop(sequence, None)
        self._count(sequence, -1)

    def append_token(self, sequence: Sequence, token_id: int) -> None:
        """Appends a token that arrived after a waiting sequence had lost its slot."""
        sequence.append(token_id)
        self._total.num_tokens += 1
        self._by_tenant[sequence.request.tenant].num_tokens += 1

    def _count(self, sequence: Sequence, sign: int) -> None:
        num_tokens = sign * len(sequence.token_ids)
        self._total.add(sign, num_tokens)
        self.num_preempted += sign * bool(sequence.num_preemptions)
        tenant = sequence.request.tenant
        load = self._by_tenant.setdefault(tenant, Load())
        load.add(sign, num_tokens)
        if not load.num_sequences:
            del self._by_tenant[tenant]
