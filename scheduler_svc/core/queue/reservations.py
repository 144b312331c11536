"""Reservations: places in the queue kept for requests that were refused for overload.

A refused request is given a time to retry. If it had no better chance at that time than a new
request, there would be no reason to wait: a place is kept around that time, and a request that
retries with the same id gets it.
"""

import heapq
from collections import deque
from dataclasses import dataclass

from scheduler_svc.core.queue.waiting import Load
from scheduler_svc.core.request.request import Request

LEAD_S = 0.5  # a place is kept from this long before its time
GRACE_S = 1.0  # and until this long after
EARLY_S = 0.02  # a retry at most this early counts as on time
MAX_RESERVATIONS = 16_384


@dataclass(frozen=True, slots=True)
class _Reservation:
    request_id: str
    tenant: str
    num_tokens: int
    due_s: float


class Reservations:
    """Reservations by request id; at most one each."""

    def __init__(self) -> None:
        self._by_id: dict[str, _Reservation] = {}
        # By time, then by number: two may be due at the same time, even of the same request.
        self._coming: list[tuple[float, int, _Reservation]] = []
        self._num_made = 0
        self._due: deque[_Reservation] = deque()  # by due time
        self._now_s = 0.0
        self.due = Load()  # places kept now
        self._due_by_tenant: dict[str, Load] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def make(self, request: Request, due_s: float) -> None:
        """Reserves a place for a refused request; a second reservation replaces the first."""
        self._forget(request.request_id)
        if len(self._by_id) >= MAX_RESERVATIONS:
            return  # the request retries without a reservation
        reservation = _Reservation(request.request_id, request.tenant, request.num_tokens, due_s)
        self._by_id[reservation.request_id] = reservation
        self._num_made += 1
        heapq.heappush(self._coming, (due_s, self._num_made, reservation))
        self.advance(self._now_s)

    def advance(self, now_s: float) -> None:
        """Starts keeping places whose time is near, and drops those whose time has passed."""
        self._now_s = max(self._now_s, now_s)
        while self._coming and self._coming[0][0] - LEAD_S <= self._now_s:
            reservation = heapq.heappop(self._coming)[2]
            if self._by_id.get(reservation.request_id) is reservation:
                self._due.append(reservation)
                self._count(reservation, 1)
        while self._due and self._due[0].due_s + GRACE_S < self._now_s:
            reservation = self._due[0]
            if self._by_id.get(reservation.request_id) is reservation:
                self._forget(reservation.request_id)
            self._due.popleft()

    def is_due(self, request_id: str) -> bool:
        """True if a place is kept for this request now."""
        reservation = self._by_id.get(request_id)
        return reservation is not None and reservation.due_s - EARLY_S <= self._now_s

    def due_of(self, tenant: str) -> Load:
        """Places kept for one tenant."""
        return self._due_by_tenant.get(tenant) or Load()

    def keep(self, request_id: str) -> None:
        """Ends the reservation of a request that has been accepted."""
        self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        reservation = self._by_id.pop(request_id, None)
        if reservation is not None and reservation.due_s - LEAD_S <= self._now_s:
            self._count(reservation, -1)

    def _count(self, reservation: _Reservation, sign: int) -> None:
        load = self._due_by_tenant.setdefault(reservation.tenant, Load())
        for counted in (self.due, load):
            counted.add(sign, sign * reservation.num_tokens)
        if not load.num_sequences:
            del self._due_by_tenant[reservation.tenant]
