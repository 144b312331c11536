"""A heap of deadlines; a call costs nothing while none is due."""

import heapq
from collections.abc import Iterable, Iterator

from scheduler_svc.core.request.sequence import Sequence, Status


class Deadlines:
    """Sequences by deadline. Those that have finished are skipped."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Sequence]] = []

    @property
    def next_s(self) -> float | None:
        """The earliest deadline of a live sequence, in seconds; None when there is none."""
        while self._heap and self._heap[0][2].status is Status.FINISHED:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def add(self, sequence: Sequence) -> None:
        """Adds a sequence, if its request has a deadline."""
        deadline_s = sequence.request.deadline_s
        if deadline_s is not None:
            heapq.heappush(self._heap, (deadline_s, sequence.number, sequence))

    def clear(self) -> None:
        """Removes all sequences."""
        self._heap.clear()

    def restart(self, live: Iterable[Sequence]) -> None:
        """Holds the live sequences alone."""
        self._heap.clear()
        for sequence in live:
            self.add(sequence)

    def take_due(self, now_s: float) -> Iterator[Sequence]:
        """Removes and yields the live sequences whose deadline is at or before `now_s`."""
        while self._heap and self._heap[0][0] <= now_s:
            sequence = heapq.heappop(self._heap)[2]
            if sequence.status is not Status.FINISHED:
                yield sequence


def expiry_of(sequence: Sequence, now_s: float) -> str:
    """Why a sequence ends at its deadline, and how long it spent in each phase."""
    request = sequence.request
    assert request.deadline_s is not None
    allowed_s = request.deadline_s - request.arrival_s
    return f"the deadline of {allowed_s:.3f} s passed after {sequence.timeline.tell(now_s)}"
