"""Scheduling policies: interchangeable orders of the waiting sequences.

A policy holds sequences and knows nothing of slots, blocks or limits. A sequence that was taken out
comes back through `put_back` if it did not fit, was preempted, or lost its worker. No policy reads
a clock: ageing uses arrival times, fairness uses token counts.
"""

import heapq
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Iterable, Iterator

from scheduler_svc.core.queue.fair_share import FairShare
from scheduler_svc.core.request.config import Policy, SchedulerConfig
from scheduler_svc.core.request.request import Request
from scheduler_svc.core.request.sequence import Sequence, Status


class Order(ABC):
    """A queue that decides which sequence is next. Sequences that have finished are skipped."""

    @abstractmethod
    def append(self, sequence: Sequence) -> None:
        """Adds a new sequence."""

    @abstractmethod
    def put_back(self, sequence: Sequence) -> None:
        """Returns a sequence that was taken; of several, the last in the order comes first."""

    @abstractmethod
    def take(self) -> Sequence | None:
        """Removes and returns the next sequence; None when the queue is empty."""

    def change(self, sequence: Sequence, request: Request) -> None:
        """Replaces a waiting sequence's request, which may change its place in the queue."""
        sequence.request = request

    @abstractmethod
    def __iter__(self) -> Iterator[Sequence]:
        """All sequences, in the order in which they would be taken if nothing changed."""

    def is_more_urgent(self, sequence: Sequence, running: Sequence) -> bool:
        """True if this waiting sequence should preempt the running one."""
        return False

    def by_seniority(self, running: Iterable[Sequence]) -> tuple[Sequence, ...]:
        """Sorts running sequences, given in order of admission; the last are preempted first."""
        return tuple(running)


class FirstCome(Order):
    """First come, first served; sequences that come back are first."""

    def __init__(self) -> None:
        self._queue: deque[Sequence] = deque()

    def append(self, sequence: Sequence) -> None:
        self._queue.append(sequence)

    def put_back(self, sequence: Sequence) -> None:
        self._queue.appendleft(sequence)

    def take(self) -> Sequence | None:
        while self._queue:
            sequence = self._queue.popleft()
            if sequence.status is not Status.FINISHED:
                return sequence
        return None

    def __iter__(self) -> Iterator[Sequence]:
        return (s for s in self._queue if s.status is not Status.FINISHED)


class ByPriority(Order):
    """The smallest priority number first, ties by arrival.

    Waiting raises urgency: `ageing_s` seconds count as much as one priority level. All sequences
    age alike, so the order of any two never changes, and a sequence of priority p is overtaken by
    those of priority 0 only if they arrive within p * ageing_s seconds (likewise for other
    priorities). This bounds its wait.
    """

    def __init__(self, ageing_s: float) -> None:
        self._ageing_s = ageing_s
        self._heap: list[tuple[float, int, Sequence]] = []
        self._moved: Counter[tuple[float, int]] = Counter()  # outdated heap entries

    def rank(self, sequence: Sequence) -> tuple[float, int]:
        """Sort key: smaller is more urgent; unique to the sequence."""
        request = sequence.request
        return request.arrival_s + request.priority * self._ageing_s, sequence.number

    def append(self, sequence: Sequence) -> None:
        heapq.heappush(self._heap, (*self.rank(sequence), sequence))

    def put_back(self, sequence: Sequence) -> None:
        self.append(sequence)

    def change(self, sequence: Sequence, request: Request) -> None:
        # The old entry stays in the heap and is skipped once: entries of one rank are all alike.
        self._moved[self.rank(sequence)] += 1
        sequence.request = request
        self.append(sequence)

    def take(self) -> Sequence | None:
        while self._heap:
            rank, number, sequence = heapq.heappop(self._heap)
            if self._moved and self._is_moved((rank, number), self._moved):
                continue
            if sequence.status is not Status.FINISHED:
                return sequence
        return None

    @staticmethod
    def _is_moved(rank: tuple[float, int], moved: Counter[tuple[float, int]]) -> bool:
        if rank not in moved:
            return False
        moved[rank] -= 1
        if not moved[rank]:
            del moved[rank]
        return True

    def __iter__(self) -> Iterator[Sequence]:
        moved = self._moved.copy()
        for rank, number, sequence in sorted(self._heap):
            if self._is_moved((rank, number), moved):
                continue
            if sequence.status is not Status.FINISHED:
                yield sequence

    def is_more_urgent(self, sequence: Sequence, running: Sequence) -> bool:
        # Both must hold: a running sequence that has waited long keeps its place against newer
        # ones.
        return sequence.request.priority < running.request.priority and (
            self.rank(sequence) < self.rank(running)
        )

    def by_seniority(self, running: Iterable[Sequence]) -> tuple[Sequence, ...]:
        return tuple(sorted(running, key=self.rank))


class ByShare(Order):
    """Fair share: the tenant served least is first, and of each tenant the first to arrive."""

    def __init__(self, share: FairShare) -> None:
        self._share = share
        self._queues: dict[str, deque[Sequence]] = {}
        # Counters only grow, so an entry may be too small, never too large; take() corrects it.
        self._heap: list[tuple[float, str]] = []

    def append(self, sequence: Sequence) -> None:
        tenant = sequence.request.tenant
        if tenant not in self._queues:
            self._share.enter(tenant, self._least())
        self._queue_of(tenant).append(sequence)

    def put_back(self, sequence: Sequence) -> None:
        self._queue_of(sequence.request.tenant).appendleft(sequence)

    def _queue_of(self, tenant: str) -> deque[Sequence]:
        queue = self._queues.get(tenant)
        if queue is None:
            queue = self._queues[tenant] = deque()
            heapq.heappush(self._heap, (self._share.counter(tenant), tenant))
        return queue

    def take(self) -> Sequence | None:
        while self._least() is not None:
            tenant = self._heap[0][1]
            queue = self._queues[tenant]
            sequence = queue.popleft() if queue else None
            if not queue:
                del self._queues[tenant]
                heapq.heappop(self._heap)
                self._share.leave(tenant)
            if sequence is not None and sequence.status is not Status.FINISHED:
                return sequence
        return None

    def _least(self) -> float | None:
        """The smallest counter of a waiting tenant, then on top of the heap; None if none waits."""
        while self._heap:
            counter, tenant = self._heap[0]
            current = self._share.counter(tenant)
            if current == counter:
                return counter
            heapq.heapreplace(self._heap, (current, tenant))
        return None

    def __iter__(self) -> Iterator[Sequence]:
        for tenant in sorted(self._queues, key=lambda name: (self._share.counter(name), name)):
            yield from (s for s in self._queues[tenant] if s.status is not Status.FINISHED)


def make_order(config: SchedulerConfig, share: FairShare) -> Order:
    """The queue for the configured policy."""
    match config.policy:
        case Policy.FCFS:
            return FirstCome()
        case Policy.PRIORITY:
            return ByPriority(config.priority_ageing_s)
        case Policy.FAIR:
            return ByShare(share)
