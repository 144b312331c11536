"""One subscription of this gateway to its scheduler, shared by all who watch.

It begins with the first viewer and ends with the last. A message is turned into bytes once; a
viewer who reads slowly misses some and gets the newest.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import grpc

from gateway.errors.request_errors import ErrorKind, RequestError, unavailable
from gateway.page.frames import PHASES, RequestFacts, event, frame_body
from pagewire.v1 import live_pb2, live_pb2_grpc

INTERVAL_S = 0.1
SILENCE_S = 5.0  # of the scheduler, after which the stream is begun anew
RETRY_S = 0.5
LATENCY_EVERY = 10  # messages
MOST_SESSIONS = 50  # of a worker group
MAX_VIEWERS = 64

log = logging.getLogger("gateway.page.feed")


@dataclass(frozen=True, slots=True)
class Moment:
    """The next message to all viewers; `facts` is for those who have had the moment before."""

    number: int
    facts: bytes
    frame: bytes


class LiveFeed:
    """The stream's source. All methods belong to the event loop's thread."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        latency: Callable[[], Mapping[str, Any]] = dict,
        facts_of_gateway: Mapping[str, Any] | None = None,
    ) -> None:
        """`latency` gives the counts of histograms; the mapping is said once to each viewer."""
        self._stub: live_pb2_grpc.LiveServiceAsyncStub = live_pb2_grpc.LiveServiceStub(channel)
        self._latency = latency
        self._hello = event(
            "hello",
            {
                "interval_s": INTERVAL_S,
                "phases": {letter: _phase(value) for value, letter in PHASES.items()},
                **(facts_of_gateway or {}),
            },
        )
        self._facts = RequestFacts()
        self._moment: Moment | None = None
        self._number = 0
        self._turn = asyncio.Event()  # another one for each moment
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False
        self.num_viewers = 0

    def open(self) -> AsyncGenerator[bytes, None]:
        """The events for one more viewer. Raises RequestError when there are too many."""
        if self._is_closed:
            raise unavailable("this gateway is shutting down")
        if self.num_viewers >= MAX_VIEWERS:
            problem = f"{MAX_VIEWERS} viewers watch this gateway already"
            raise RequestError(ErrorKind.OVERLOADED, problem, retry_after_s=10.0)
        return self._events()

    async def _events(self) -> AsyncGenerator[bytes, None]:
        self.num_viewers += 1
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        try:
            yield self._hello
            seen = -1
            while not self._is_closed:
                turn, moment = self._turn, self._moment
                if moment is None or moment.number == seen:
                    await turn.wait()
                    continue
                is_next = moment.number == seen + 1
                yield (moment.facts if is_next else self._facts.everything()) + moment.frame
                seen = moment.number
        finally:
            self.num_viewers -= 1
            if not self.num_viewers:
                self._stop()

    def _stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = None
        self._moment = None
        self._facts.forget()

    def close(self) -> None:
        """Ends the stream of every viewer, and refuses new ones."""
        self._is_closed = True
        self._turn.set()

    async def _run(self) -> None:
        """Keeps a subscription open until cancelled."""
        while True:
            try:
                async with aclosing(self._messages()) as messages:
                    async for message in messages:
                        self._show(message)
                reason = "the scheduler has ended the stream"
            except grpc.aio.AioRpcError as error:
                reason = _reason(error)
                log.info("the live stream broke: %s: %s", error.code().name, error.details())
            except TimeoutError:
                reason = "the scheduler is silent"
            except Exception as error:  # of ours: the stream begins anew
                reason = "a message of the scheduler cannot be read"
                log.warning("%s: %s", reason, type(error).__name__)
            self._facts.forget()
            self._publish(self._facts.everything(), event("away", {"reason": reason}))
            await asyncio.sleep(RETRY_S)

    async def _messages(self) -> AsyncGenerator[live_pb2.WatchResponse, None]:
        wanted = live_pb2.WatchRequest(interval_s=INTERVAL_S, most_sessions=MOST_SESSIONS)
        call = self._stub.Watch(wanted)
        try:
            while True:
                async with asyncio.timeout(SILENCE_S):
                    message = await call.read()
                if not isinstance(message, live_pb2.WatchResponse):  # the end of the stream
                    return
                yield message
        finally:
            call.cancel()

    def _show(self, message: live_pb2.WatchResponse) -> None:
        body = frame_body(message)
        if self._number % LATENCY_EVERY == 0 or self._moment is None:
            body |= self._latency()
        self._publish(self._facts.take(message), event("frame", body))

    def _publish(self, facts: bytes, frame: bytes) -> None:
        self._number += 1
        self._moment = Moment(self._number, facts, frame)
        turn, self._turn = self._turn, asyncio.Event()
        turn.set()


def _phase(value: int) -> str:
    return live_pb2.LivePhase.Name(value).removeprefix("LIVE_PHASE_").lower()


def _reason(error: grpc.aio.AioRpcError) -> str:
    """Why there is no stream, without an address of ours."""
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return "this scheduler is older than the page: it cannot be watched"
    if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return "too many watch this scheduler"
    if error.code() in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        return "the scheduler does not let this gateway watch"
    return "the scheduler does not answer"
