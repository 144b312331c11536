"""Server-sent events as an answer that says when it waits.

Proxies and clients end a stream in which no byte comes for a minute or less. Once a request was
submitted, its answer begins after the first interval without an event, with a ping, and each
further interval without one brings another ping.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from fastapi.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from gateway.errors.request_errors import ended_by
from gateway.http.events import DONE, error_event

COMMENT = b": waiting\n\n"  # no event: clients skip the line


@dataclass(frozen=True, slots=True)
class Waiting:
    """The words of an API's stream while it waits, and at its failure."""

    ping: bytes
    failed: Callable[[Exception], bytes]  # the last event of a stream whose source fails


def _failed(error: Exception) -> bytes:
    return error_event(ended_by(error)) + DONE


OPENAI = Waiting(COMMENT, _failed)


class EventStream(StreamingResponse):
    """Server-sent events; closes its source together with the response, however that ends."""

    def __init__(
        self,
        first: asyncio.Task[bytes],
        events: AsyncGenerator[bytes, None],
        waiting: Waiting,
        interval_s: float,
    ) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._first = first
        self._events = events
        self._waiting = waiting
        self._interval_s = interval_s

    async def stream_response(self, send: Send) -> None:
        """Sends the head, a ping if no event is there yet, all events, and the end of the body."""
        status, headers = self.status_code, self.raw_headers
        await send({"type": "http.response.start", "status": status, "headers": headers})
        with _Pulse(send, self._waiting.ping, self._interval_s) as pulse:
            if not self._first.done():
                await send(_part(self._waiting.ping))
            async with aclosing(self._told()) as chunks:
                async for chunk in chunks:
                    pulse.last_s = pulse.loop.time()
                    await send(_part(chunk))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _told(self) -> AsyncGenerator[bytes, None]:
        """All events, with that of a failure in place of the rest: the status has been sent."""
        try:
            yield await self._first
            async for chunk in self._events:
                yield chunk
        except Exception as error:  # whatever it is, the client hears of it in the stream
            yield self._waiting.failed(error)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events):
            try:
                await super().__call__(scope, receive, send)
            finally:
                self._first.cancel()
                await asyncio.wait((self._first,))  # what runs cannot be closed


class _Pulse:
    """Context manager of a stream: sends a ping when nothing was sent for the interval.

    One timer for all events of a stream, which looks again when the current silence would be long
    enough.
    """

    def __init__(self, send: Send, ping: bytes, interval_s: float) -> None:
        self.loop = asyncio.get_running_loop()
        self.last_s = self.loop.time()  # of an event or a ping
        self._send, self._ping = send, _part(ping)
        self._interval_s = interval_s
        self._timer: asyncio.TimerHandle | None = None
        self._sending: asyncio.Task[None] | None = None

    def __enter__(self) -> Self:
        if self._interval_s:
            self._timer = self.loop.call_later(self._interval_s, self._look)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._sending is not None:
            self._sending.cancel()

    def _look(self) -> None:
        left_s = self.last_s + self._interval_s - self.loop.time()
        if left_s <= 0:
            left_s = self._interval_s
            self.last_s = self.loop.time()
            if self._sending is None or self._sending.done():  # else the client does not read
                self._sending = self.loop.create_task(self._send_ping())
        self._timer = self.loop.call_later(left_s, self._look)

    async def _send_ping(self) -> None:
        await self._send(self._ping)


def _part(chunk: bytes) -> Message:
    return {"type": "http.response.body", "body": chunk, "more_body": True}
