"""The one stream between this gateway and its scheduler, shared by all requests.

Submits and aborts go up; once per step one message comes down with the new tokens of every request
of this gateway. The link hands each request its own and reconnects when the stream breaks. It knows
token ids and handles, no text.
"""

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import islice

import grpc

from gateway.convert import (
    abort_to_proto,
    finished_from_proto,
    logprobs_from_proto,
    submit_to_proto,
)
from gateway.errors import RequestError, unavailable
from gateway.generation import Finish, Pooling, Reuse, SamplingParams, Standing
from gateway.logprobs import RawLogprobs
from pagewire.v1 import scheduler_pb2, scheduler_pb2_grpc
from rpc import columns
from rpc.prompt_reports import PromptReport

FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 3.0
WAKES_PER_ROUND = 16  # of the event loop: some 0.5 ms of work

log = logging.getLogger("gateway.scheduler_link")

Outbox = asyncio.Queue[scheduler_pb2.SessionRequest | None]  # None ends the stream


@dataclass(frozen=True, slots=True)
class Arrival:
    """New tokens and, once there are no more to come, how it ended."""

    token_ids: list[int]
    logprobs: list[RawLogprobs]  # one per token, if asked for
    end: Finish | None
    reports: list[PromptReport] = field(default_factory=list)  # of the prompt, before the tokens


class LiveRequest:
    """A submitted request as its reader sees it: tokens, then an end.

    Tokens that come faster than they are read collect here, so a slow reader wakes up less often
    and holds up nobody. max_tokens bounds them.
    """

    __slots__ = (
        "_end",
        "_logprobs",
        "_reports",
        "_token_ids",
        "_waiter",
        "handle",
        "num_cached_tokens",
    )

    def __init__(self, handle: int) -> None:
        self.handle = handle
        self.num_cached_tokens = 0  # known with the first token
        self._token_ids: list[int] = []
        self._logprobs: list[RawLogprobs] = []
        self._reports: list[PromptReport] = []
        self._end: Finish | RequestError | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def receive(self) -> Arrival:
        """What came since the last call; waits for it.

        Raises RequestError when the request was refused or failed; tokens that came before are
        returned first. One reader only.
        """
        if not self._token_ids and self._end is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        token_ids, self._token_ids = self._token_ids, []
        logprobs, self._logprobs = self._logprobs, []
        reports, self._reports = self._reports, []
        if isinstance(self._end, RequestError):
            if not token_ids:
                raise self._end
            return Arrival(token_ids, logprobs, None, reports)
        return Arrival(token_ids, logprobs, self._end, reports)

    def add(self, token_id: int, logprobs: RawLogprobs | None) -> None:
        """One more token; wake() tells the reader."""
        self._token_ids.append(token_id)
        if logprobs is not None:
            self._logprobs.append(logprobs)

    def add_report(self, report: PromptReport) -> None:
        """What was found out about a part of the prompt; the first token, or the end, is behind."""
        self._reports.append(report)

    def end(self, how: Finish | RequestError) -> None:
        """Nothing more will come; wake() tells the reader."""
        self._end = how

    def wake(self) -> None:
        """Lets the reader see what was added; once per step, not once per token."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class WakeQueue:
    """Whose reader is to be woken, in turn, a few per round of the event loop.

    Between two rounds the loop reads what else has come. A gateway that keeps up wakes everybody
    before the next step; one that is behind finds the next tokens of those still in the queue added
    to the ones that they wait for, and what costs something per message is paid once for both.
    """

    def __init__(self) -> None:
        self._waiting: dict[LiveRequest, None] = {}  # in order; each once
        self._is_running = False

    def add(self, touched: Iterable[LiveRequest]) -> None:
        """There is news for these."""
        self._waiting.update(dict.fromkeys(touched))
        if not self._is_running:
            self._run()

    def _run(self) -> None:
        for live in list(islice(self._waiting, WAKES_PER_ROUND)):
            del self._waiting[live]
            live.wake()
        self._is_running = bool(self._waiting)
        if self._is_running:
            asyncio.get_running_loop().call_soon(self._run)


class SchedulerLink:
    """The stream and the requests on it. All methods belong to the event loop's thread."""

    def __init__(self, channel: grpc.aio.Channel, address: str) -> None:
        self._stub: scheduler_pb2_grpc.SchedulerServiceAsyncStub = (
            scheduler_pb2_grpc.SchedulerServiceStub(channel)
        )
        self._address = address
        self._live: dict[int, LiveRequest] = {}
        self._handles = itertools.count(1)
        self._wakes = WakeQueue()
        self._outbox: Outbox | None = None  # there while a stream is open
        self.changed = asyncio.Event()  # set when a stream opens or breaks; its waiter clears it

    @property
    def is_open(self) -> bool:
        """Whether requests can be submitted."""
        return self._outbox is not None

    def submit(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        sampling: SamplingParams,
        standing: Standing,
        reuse: Reuse,
        pooling: Pooling | None = None,
    ) -> LiveRequest:
        """Sends a request; its reader must close() it."""
        if self._outbox is None:
            raise unavailable(f"no connection to the scheduler at {self._address}")
        live = LiveRequest(self._free_handle())
        self._live[live.handle] = live
        message = submit_to_proto(
            live.handle, request_id, prompt_token_ids, sampling, standing, reuse, pooling
        )
        self._outbox.put_nowait(message)
        return live

    def close(self, live: LiveRequest) -> None:
        """Ends the reader's interest; aborts the request if it still runs."""
        if self._live.pop(live.handle, None) is not None and self._outbox is not None:
            self._outbox.put_nowait(abort_to_proto(live.handle))

    def _free_handle(self) -> int:
        # Handles come round after 2**32 requests; the long-lived ones keep theirs.
        while (handle := next(self._handles) & 0xFFFFFFFF) in self._live:
            pass
        return handle

    async def run(self) -> None:
        """Keeps a stream open until cancelled."""
        backoff_s = FIRST_BACKOFF_S
        while True:
            try:
                async with aclosing(self._open()) as responses:
                    async for response in responses:
                        backoff_s = FIRST_BACKOFF_S
                        self._deliver(response)
                problem = "it closed the stream"
            except grpc.aio.AioRpcError as error:
                problem = f"{error.code().name}: {error.details()}"
            except columns.BadColumn as error:
                problem = f"its message cannot be read: {error}"
            finally:
                self._outbox = None
            self._lose(problem)
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

    async def _open(self) -> AsyncGenerator[scheduler_pb2.SessionResponse, None]:
        outbox: Outbox = asyncio.Queue()
        call = self._stub.Session(_drain(outbox))
        try:
            await call.wait_for_connection()
            self._outbox = outbox
            self.changed.set()
            log.info("connected to the scheduler at %s", self._address)
            async for response in call:
                yield response
        finally:
            # gRPC's task that reads the outbox outlives a stream that the other side has ended.
            outbox.put_nowait(None)
            call.cancel()

    def _lose(self, problem: str) -> None:
        """The stream is gone, and with it the scheduler's memory of our requests.

        Their readers hold prompt and tokens so far: this is the place to submit them again as
        continuations instead of failing them.
        """
        if self._live:
            log.warning("lost the scheduler with %d requests live: %s", len(self._live), problem)
        error = unavailable(f"lost the scheduler at {self._address}: {problem}")
        for live in self._live.values():
            live.end(error)
            live.wake()
        self._live.clear()
        self.changed.set()

    def _deliver(self, response: scheduler_pb2.SessionResponse) -> None:
        handles = columns.unpack(response.handles, columns.UINT32, name="handles").tolist()
        token_ids = columns.unpack(response.token_ids, name="token_ids").tolist()
        if len(handles) != len(token_ids):
            raise columns.BadColumn(f"{len(handles)} handles but {len(token_ids)} token_ids")
        logprobs = logprobs_from_proto(response)
        touched = []
        for packed in response.prompt_reports:
            live = self._live.get(packed.owner)
            if live is not None:
                live.add_report(PromptReport.unpack(packed))
        for position, (handle, token_id) in enumerate(zip(handles, token_ids, strict=True)):
            live = self._live.get(handle)
            if live is not None:  # else: closed here, its last tokens were on their way
                live.add(token_id, logprobs.get(position))
                touched.append(live)
        for admitted in response.admitted:
            live = self._live.get(admitted.handle)
            if live is not None:
                live.num_cached_tokens = admitted.cached_tokens
        for finished in response.finished:
            live = self._live.pop(finished.handle, None)
            if live is not None:
                live.end(finished_from_proto(finished))
                touched.append(live)
        self._wakes.add(touched)


async def _drain(outbox: Outbox) -> AsyncGenerator[scheduler_pb2.SessionRequest, None]:
    while (message := await outbox.get()) is not None:
        yield message
