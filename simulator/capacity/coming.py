"""The requests that are still to come: by their times, and by the ends that they await."""

import heapq
from collections.abc import Sequence

from simulator.capacity.workload import Arrival


class Coming:
    """Arrivals by number, their place in the workload, until they are taken."""

    def __init__(self, arrivals: Sequence[Arrival]) -> None:
        self._arrivals = arrivals
        self._num_awaited = [len(arrival.follows) for arrival in arrivals]
        self._followers: dict[int, list[int]] = {}
        for number, arrival in enumerate(arrivals):
            for followed in arrival.follows:
                self._followers.setdefault(followed, []).append(number)
        self._due = [(a.arrival_s, n) for n, a in enumerate(arrivals) if not a.follows]
        heapq.heapify(self._due)
        self._num_left = len(arrivals)

    def __len__(self) -> int:
        return self._num_left

    @property
    def next_s(self) -> float | None:
        """The time of the next one; None if all that are left await the end of another."""
        return self._due[0][0] if self._due else None

    def take(self, now_s: float) -> list[tuple[int, Arrival]]:
        """Removes and returns those that have come, with their numbers and times as they came."""
        taken = []
        while self._due and self._due[0][0] <= now_s:
            at_s, number = heapq.heappop(self._due)
            arrival = self._arrivals[number]
            taken.append((number, arrival if at_s == arrival.arrival_s else arrival.at(at_s)))
        self._num_left -= len(taken)
        return taken

    def ended(self, number: int, now_s: float) -> None:
        """Has those come that awaited this one last, each after its pause."""
        for follower in self._followers.get(number, ()):
            self._num_awaited[follower] -= 1
            if not self._num_awaited[follower]:
                at_s = now_s + self._arrivals[follower].pause_s
                heapq.heappush(self._due, (at_s, follower))
