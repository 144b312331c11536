"""Calls by idempotency key: one that is sent again gets the answer of the first, and runs nothing.

Knows no gRPC: a call is a function that makes the answer. A call goes on for a while after its
caller is gone, since a lost connection and a caller who left look the same here. What is kept is
bounded in number for each tenant, in bytes and in time. Failures are not kept: nothing of a
refused call ran, and a failed one may be tried again.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial

from google.protobuf.message import Message

from gateway.errors.request_errors import invalid

KEPT_S = 120.0  # an answer, since it was complete
GRACE_S = 5.0  # a call without a caller
MAX_PER_TENANT = 256
MAX_LEFT = 64  # calls without a caller
MAX_KEPT = 4096  # answers of all tenants
MAX_BYTES = 64 << 20  # of the answers of all tenants


@dataclass(frozen=True, slots=True)
class CallKey:
    """The name of a call: a key means something to its tenant alone."""

    tenant: str
    key: str


@dataclass(slots=True)
class _Call:
    """A call that runs or has ended."""

    digest: bytes  # of the request
    task: "asyncio.Task[Message]"
    num_callers: int = 0
    num_bytes: int = 0  # of the answer, once it is complete
    ended_s: float | None = None
    grace: asyncio.TimerHandle | None = field(default=None, repr=False)


class RecentCalls:
    """The calls of one process that have a key. For one event loop."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        grace_s: float = GRACE_S,
        max_per_tenant: int = MAX_PER_TENANT,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self._clock = clock
        self._grace_s = grace_s
        self._max_per_tenant = max_per_tenant
        self._max_bytes = max_bytes
        self._running: dict[CallKey, _Call] = {}
        self._ended: OrderedDict[CallKey, _Call] = OrderedDict()  # oldest first
        self._num_ended: dict[str, int] = {}  # by tenant
        self._num_bytes = 0

    @property
    def num_kept(self) -> int:
        """Answers that are kept."""
        return len(self._ended)

    async def run(
        self, key: CallKey, digest: bytes, start: Callable[[], Awaitable[Message]]
    ) -> Message:
        """The answer of the call with this key: one that runs or has ended, else a new one.

        Raises RequestError when the key is that of another request, and what the call raises.
        """
        self._expire()
        call = self._running.get(key) or self._ended.get(key)
        if call is None:
            call = self._running[key] = _Call(digest, asyncio.ensure_future(_awaited(start)))
            call.task.add_done_callback(partial(self._note_end, key, call))
        elif call.digest != digest:
            raise invalid("idempotency_key", "is that of another request")
        if call.grace is not None:
            call.grace.cancel()
            call.grace = None
        call.num_callers += 1
        try:
            return await asyncio.shield(call.task)
        finally:
            call.num_callers -= 1
            if not call.num_callers and not call.task.done():
                self._leave(key, call)

    def _leave(self, key: CallKey, call: _Call) -> None:
        """Ends a call that has no caller any more, after a while."""
        left = [other for other, running in self._running.items() if running.grace is not None]
        if len(left) >= MAX_LEFT:  # callers who leave at once must not pile up work
            self._give_up(left[0])
        call.grace = asyncio.get_running_loop().call_later(self._grace_s, self._give_up, key)

    def _give_up(self, key: CallKey) -> None:
        """Cancels a call; one with its key that comes from now on is new."""
        call = self._running.pop(key)
        if call.grace is not None:
            call.grace.cancel()
        call.task.cancel()

    def _note_end(self, key: CallKey, call: _Call, _: object) -> None:
        if self._running.get(key) is call:
            del self._running[key]
        if call.grace is not None:
            call.grace.cancel()
            call.grace = None
        if call.task.cancelled() or call.task.exception() is not None:
            return
        call.ended_s, call.num_bytes = self._clock(), call.task.result().ByteSize()
        if key in self._ended:  # of a call that was given up and ended all the same
            self._forget(key)
        self._ended[key] = call
        self._num_bytes += call.num_bytes
        self._num_ended[key.tenant] = self._num_ended.get(key.tenant, 0) + 1
        if self._num_ended[key.tenant] > self._max_per_tenant:
            self._forget(next(other for other in self._ended if other.tenant == key.tenant))
        while self._num_bytes > self._max_bytes or len(self._ended) > MAX_KEPT:
            self._forget(next(iter(self._ended)))

    def _expire(self) -> None:
        while self._ended:
            key, oldest = next(iter(self._ended.items()))
            assert oldest.ended_s is not None
            if self._clock() - oldest.ended_s < KEPT_S:
                return
            self._forget(key)

    def _forget(self, key: CallKey) -> None:
        self._num_bytes -= self._ended.pop(key).num_bytes
        self._num_ended[key.tenant] -= 1
        if not self._num_ended[key.tenant]:
            del self._num_ended[key.tenant]


async def _awaited(start: Callable[[], Awaitable[Message]]) -> Message:
    return await start()
