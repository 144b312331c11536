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
MAX_PROMISES = 16_384


@dataclass(frozen=True, slots=True)
class _Promise:
    request_id: str
    tenant: str
    num_tokens: int
    due_s: float


class Promises:
    """Reservations by request id; at most one each."""

    def __init__(self) -> None:
        self._by_id: dict[str, _Promise] = {}
        # By time, then by number: two may be due at the same time, even of the same request.
        self._coming: list[tuple[float, int, _Promise]] = []
        self._num_made = 0
        self._due: deque[_Promise] = deque()  # by due time
        self._now_s = 0.0
        self.due = Load()  # places kept now
        self._due_by_tenant: dict[str, Load] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def make(self, request: Request, due_s: float) -> None:
        """Reserves a place for a refused request; a second reservation replaces the first."""
        self._forget(request.request_id)
        if len(self._by_id) >= MAX_PROMISES:
            return  # the request retries without a reservation
        promise = _Promise(request.request_id, request.tenant, request.num_tokens, due_s)
        self._by_id[promise.request_id] = promise
        self._num_made += 1
        heapq.heappush(self._coming, (due_s, self._num_made, promise))
        self.advance(self._now_s)

    def advance(self, now_s: float) -> None:
        """Starts keeping places whose time is near, and drops those whose time has passed."""
        self._now_s = max(self._now_s, now_s)
        while self._coming and self._coming[0][0] - LEAD_S <= self._now_s:
            promise = heapq.heappop(self._coming)[2]
            if self._by_id.get(promise.request_id) is promise:
                self._due.append(promise)
                self._count(promise, 1)
        while self._due and self._due[0].due_s + GRACE_S < self._now_s:
            promise = self._due[0]
            if self._by_id.get(promise.request_id) is promise:
                self._forget(promise.request_id)
            self._due.popleft()

    def is_due(self, request_id: str) -> bool:
        """Whether a place is kept for this request now."""
        promise = self._by_id.get(request_id)
        return promise is not None and promise.due_s - EARLY_S <= self._now_s

    def due_of(self, tenant: str) -> Load:
        """Places kept for one tenant."""
        return self._due_by_tenant.get(tenant) or Load()

    def keep(self, request_id: str) -> None:
        """Ends the reservation of a request that has been accepted."""
        self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        promise = self._by_id.pop(request_id, None)
        if promise is not None and promise.due_s - LEAD_S <= self._now_s:
            self._count(promise, -1)

    def _count(self, promise: _Promise, sign: int) -> None:
        load = self._due_by_tenant.setdefault(promise.tenant, Load())
        for counted in (self.due, load):
            counted.add(sign, sign * promise.num_tokens)
        if not load.num_sequences:
            del self._due_by_tenant[promise.tenant]
