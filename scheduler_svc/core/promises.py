"""Places in the queue that were promised to requests refused for overload.

A refused request is told when to come again. If those who were told and those who just arrive had
the same chances then, obeying would be of no use: a place is kept for a while around that time,
and a request that comes back under its id gets it.
"""

import heapq
from collections import deque
from dataclasses import dataclass

from scheduler_svc.core.request import Request
from scheduler_svc.core.waiting import Load

LEAD_S = 0.5  # a place is kept from so long before its time
GRACE_S = 1.0  # and until so long after
EARLY_S = 0.02  # who comes so much too early is on time
MAX_PROMISES = 16_384


@dataclass(frozen=True, slots=True)
class _Promise:
    request_id: str
    tenant: str
    num_tokens: int
    due_s: float


class Promises:
    """By request id; at most one each."""

    def __init__(self) -> None:
        self._by_id: dict[str, _Promise] = {}
        # By time and then by number: two may be due at the same moment, even of the same request.
        self._coming: list[tuple[float, int, _Promise]] = []
        self._num_made = 0
        self._due: deque[_Promise] = deque()  # in the order of their times
        self._now_s = 0.0
        self.due = Load()  # places kept at the moment
        self._due_by_tenant: dict[str, Load] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def make(self, request: Request, due_s: float) -> None:
        """Keeps a place for a refused request; a second promise replaces the first."""
        self._forget(request.request_id)
        if len(self._by_id) >= MAX_PROMISES:
            return  # it was told a time all the same
        promise = _Promise(request.request_id, request.tenant, request.num_tokens, due_s)
        self._by_id[promise.request_id] = promise
        self._num_made += 1
        heapq.heappush(self._coming, (due_s, self._num_made, promise))
        self.advance(self._now_s)

    def advance(self, now_s: float) -> None:
        """Begins to keep the places whose time is near, gives up those whose time is over."""
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
        """The request has come and got its place."""
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
