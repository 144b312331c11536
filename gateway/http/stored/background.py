"""Responses that are computed without a connection: begun, looked at, followed and cancelled.

Each is a task of this process. Its events are kept while it runs and, within a bound, afterwards,
so that a client can follow it from any of them. The store has the response itself at its end.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from gateway.errors import limits
from gateway.errors.request_errors import ErrorKind, RequestError

Events = AsyncGenerator[bytes, None]
END_OF_EVENT = b"\n\n"


class BackgroundResponse:
    """A response in the background, and its events by their numbers."""

    def __init__(self, owner: str, body: dict[str, Any]) -> None:
        self.owner = owner
        self.body = body  # as it stands; the answer changes it
        self.events: list[bytes] = []
        self.num_bytes = 0
        self.is_over = False
        self.task: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()

    def add(self, chunk: bytes) -> None:
        """Keeps the events of a chunk, and wakes those that follow."""
        found = [event + END_OF_EVENT for event in chunk.split(END_OF_EVENT) if event]
        self.events += found
        self.num_bytes += len(chunk)
        self._wake()

    def end(self) -> None:
        """Nothing comes any more."""
        self.is_over = True
        self._wake()

    async def follow(self, after: int | None) -> Events:
        """The events after the one of that number, until the last one. Use aclosing()."""
        index = 0 if after is None else after + 1
        while True:
            changed = self._changed
            while index < len(self.events):
                yield self.events[index]
                index += 1
            if self.is_over:
                return
            await changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class BackgroundResponses:
    """The responses that this process computes in the background, and the latest that ended."""

    def __init__(
        self,
        max_running: int = limits.MAX_BACKGROUND_RESPONSES,
        max_of_owner: int = limits.MAX_BACKGROUND_OF_CALLER,
        max_bytes: int = limits.MAX_BACKGROUND_BYTES,
    ) -> None:
        self._max_running, self._max_of_owner = max_running, max_of_owner
        self._max_bytes = max_bytes
        self._running: dict[str, BackgroundResponse] = {}
        self._ended: OrderedDict[str, BackgroundResponse] = OrderedDict()  # oldest first

    def start(
        self,
        owner: str,
        body: dict[str, Any],
        events: Events,
        on_cancel: Callable[[], bytes],
    ) -> BackgroundResponse:
        """Begins a response. Raises RequestError where too many run.

        `events` ends by itself, also after a failure; `on_cancel` ends it early with its events.
        """
        owned = sum(one.owner == owner for one in self._running.values())
        for count, most in (
            (len(self._running), self._max_running),
            (owned, self._max_of_owner),
        ):
            if count >= most:
                problem = f"background: {count} responses run in the background, at most {most} may"
                raise RequestError(ErrorKind.OVERLOADED, problem, field="background")
        response = BackgroundResponse(owner, body)
        self._running[body["id"]] = response
        response.task = asyncio.create_task(_compute(response, events))
        # Not in the task itself: one that is cancelled before its first turn never runs.
        response.task.add_done_callback(lambda task: self._end(response, task, on_cancel))
        return response

    def find(self, owner: str, response_id: str) -> BackgroundResponse | None:
        """The response, if it runs or has ended not long ago, and belongs to this owner."""
        found = self._running.get(response_id) or self._ended.get(response_id)
        return found if found is not None and found.owner == owner else None

    async def cancel(self, response: BackgroundResponse) -> None:
        """Ends a response early; one that has ended stays as it is."""
        if response.task is not None and not response.is_over:
            response.task.cancel()
            await asyncio.wait((response.task,))

    def forget(self, response_id: str) -> None:
        """Drops the events of a response that was deleted."""
        self._ended.pop(response_id, None)

    async def close(self) -> None:
        """Ends all of them."""
        for response in list(self._running.values()):
            await self.cancel(response)

    def _end(
        self, response: BackgroundResponse, task: asyncio.Task[None], on_cancel: Callable[[], bytes]
    ) -> None:
        if task.cancelled():
            response.add(on_cancel())
        response.end()
        name = response.body["id"]
        self._ended[name] = self._running.pop(name)
        while sum(one.num_bytes for one in self._ended.values()) > self._max_bytes:
            self._ended.popitem(last=False)


async def _compute(response: BackgroundResponse, events: Events) -> None:
    async with aclosing(events):
        async for chunk in events:
            response.add(chunk)
