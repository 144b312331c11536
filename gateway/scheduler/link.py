"""The stream between this gateway and its scheduler, shared by all requests.

Submits and aborts are sent; once per step one message arrives with the new tokens of every request
of this gateway. The link delivers them to the requests and reconnects when the stream breaks; live
requests are then submitted again, prompt and output so far, and continue. It handles token ids, not
text.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace

import grpc

from gateway.errors import ErrorKind, RequestError, poison, unavailable
from gateway.generation import Finish
from gateway.scheduler.convert import (
    abort_to_proto,
    finished_from_proto,
    logprobs_from_proto,
    submit_to_proto,
)
from gateway.scheduler.live_request import LiveRequest, Submission
from gateway.scheduler.wakes import WakePace, WakeQueue
from pagewire.v1 import scheduler_pb2, scheduler_pb2_grpc, types_pb2
from wire import columns
from wire.deaths import is_death
from wire.logs.request import LoggedRequest
from wire.prompt_outputs import PromptOutput

FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 3.0
MAX_BACKOFF_TO_STANDBY_S = 0.4
RETRY_S = 0.1  # between attempts to submit lost requests again
WORKER_STARTS = 10.0  # times the limit without a scheduler: the one with a scheduler that waits
LOST = "lost the scheduler"
MAX_LOSSES = 3  # in a row without a token; the request may crash schedulers

log = logging.getLogger("gateway.scheduler.link")

Outbox = asyncio.Queue[scheduler_pb2.SessionRequest | None]  # None ends the stream


class Handover:
    """From the word of a scheduler that it will end until the next one serves.

    In between new requests are held: that is a pause for them, too, and no error.
    """

    def __init__(self, has_standby: bool) -> None:
        self._has_standby = has_standby  # then the next one takes over however this one ends
        self.is_announced = False  # by the scheduler at the other end of the open stream
        self._since_s: float | None = None

    def announce(self) -> None:
        """The scheduler takes nothing new on this stream."""
        self.is_announced = True
        self._since_s = time.monotonic()

    def stream_ended(self) -> None:
        """The stream is gone, and its scheduler with it."""
        if self.is_announced or self._has_standby:
            self.announce()
        self.is_announced = False

    def end(self) -> None:
        """The next scheduler serves."""
        self._since_s = None

    def lasts(self, limit_s: float) -> bool:
        """Whether it is going on, and has not gone on for too long."""
        if self._since_s is None:
            return False
        return self.is_announced or time.monotonic() - self._since_s < limit_s


class SchedulerLink:
    """The stream and its requests. All methods belong to the event loop's thread."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        address: str,
        scheduler_timeout_s: float = 0.0,
        gather_s: float = 0.0,
        on_lost: Callable[[], None] = lambda: None,
        *,
        has_standby: bool = False,
    ) -> None:
        self._stub: scheduler_pb2_grpc.SchedulerServiceAsyncStub = (
            scheduler_pb2_grpc.SchedulerServiceStub(channel)
        )
        self._address = address
        self._on_lost = on_lost
        self._timeout_s = scheduler_timeout_s  # live requests wait this long for the next scheduler
        # And this long if that waits for its worker, which may have a large model to load.
        self.worker_timeout_s = WORKER_STARTS * scheduler_timeout_s
        self._recovering: asyncio.Task[None] | None = None
        self._live: dict[int, LiveRequest] = {}
        self._handles = itertools.count(1)
        self._wakes = WakeQueue(WakePace(gather_s))
        self._refusal: RequestError | None = None  # of every request, since end_all
        self._outbox: Outbox | None = None  # set while a stream is open
        self._handover = Handover(has_standby)
        self._max_backoff_s = MAX_BACKOFF_TO_STANDBY_S if has_standby else MAX_BACKOFF_S
        self.changed = asyncio.Event()  # set when a stream opens or breaks; the waiter clears it

    @property
    def is_open(self) -> bool:
        """Whether requests can be submitted."""
        return self._outbox is not None

    @property
    def is_handing_over(self) -> bool:
        """Whether a scheduler that was asked to end is being followed by another one."""
        return self._handover.lasts(self._timeout_s)

    def handover_ended(self) -> None:
        """A scheduler serves, unless it is the one that has said that it ends."""
        if not self._handover.is_announced:
            self._handover.end()

    @property
    def num_running(self) -> int:
        """Requests that the scheduler has admitted."""
        return sum(live.is_running for live in self._live.values())

    def submit(self, submission: Submission) -> LiveRequest:
        """Submits a request; its reader must close() it. Raises RequestError without a stream.

        While a scheduler hands over to the next one, the request waits for that.
        """
        if self._refusal is not None:
            raise self._refusal
        if self._outbox is None and not self.is_handing_over:
            raise unavailable("no connection to the scheduler")
        live = LiveRequest(self._free_handle(), submission, time.monotonic())
        message = submit_to_proto(live.handle, submission)  # may raise: nothing is kept then
        self._live[live.handle] = live
        if self._outbox is None or self._handover.is_announced:
            live.hold(time.monotonic())
            self._start_recovering()
        else:
            self._outbox.put_nowait(message)
        return live

    def close(self, live: LiveRequest) -> None:
        """Removes a request; aborts it if it still runs."""
        if self._live.pop(live.handle, None) is not None and self._outbox is not None:
            self._outbox.put_nowait(abort_to_proto(live.handle))

    def end_all(self, error: RequestError) -> None:
        """Ends all requests with an error, and refuses new ones with it."""
        self._refusal = error
        for live in list(self._live.values()):
            self.close(live)
            live.end(error)
            live.wake()

    def _free_handle(self) -> int:
        # Handles wrap around after 2**32 requests; those of live requests are skipped.
        while (handle := next(self._handles) & 0xFFFFFFFF) in self._live:
            pass
        return handle

    async def run(self) -> None:
        """Keeps a stream open until cancelled."""
        try:
            await self._keep_open()
        finally:
            if self._recovering is not None:
                self._recovering.cancel()
                await asyncio.gather(self._recovering, return_exceptions=True)

    async def _keep_open(self) -> None:
        backoff_s = FIRST_BACKOFF_S
        while True:
            try:
                async with aclosing(self._open()) as responses:
                    async for response in responses:
                        backoff_s = FIRST_BACKOFF_S
                        self._deliver(response)
                problem = "it closed the stream"
                died = False
            except grpc.aio.AioRpcError as error:
                problem, died = f"{error.code().name}: {error.details()}", is_death(error)
            except columns.BadColumn as error:
                problem, died = f"its message cannot be read: {error}", False
            except Exception as error:  # of ours: the stream begins anew, its requests go on
                log.exception("a message of the scheduler is not delivered")
                problem, died = f"its message is not delivered: {type(error).__name__}", False
            finally:
                was_open, self._outbox = self.is_open, None
                if was_open:
                    self._handover.stream_ended()
            if was_open:
                self._on_lost()
            self._lose(problem, died)
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, self._max_backoff_s)

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

    # --- when the scheduler is gone --------------------------------------------------------------

    def _lose(self, problem: str, is_death: bool) -> None:
        """Handles the loss of the stream, and of the scheduler's state of our requests.

        The gateway holds prompt and tokens of each: they wait for the next scheduler for a limited
        time.
        """
        if self._live:
            log.warning(
                "lost the scheduler with %d requests live, at %s: %s",
                len(self._live),
                self._address,
                problem,
            )
        for live in list(self._live.values()):
            live.lose(time.monotonic(), is_death)
            if live.is_poison:
                self._fail(live, poison(live.num_deaths_in_all))
            elif live.num_losses >= MAX_LOSSES or not self._timeout_s:
                self._fail(live, unavailable(LOST))
        self.changed.set()
        if self._live:
            self._start_recovering()

    def _start_recovering(self) -> None:
        if self._recovering is None or self._recovering.done():
            self._recovering = asyncio.create_task(self._recover())

    async def _recover(self) -> None:
        """Submits the requests that wait for a scheduler again, until none waits."""
        while waiting := [live for live in self._live.values() if not live.is_submitted]:
            for live in waiting:
                self._try_again(live, time.monotonic())
            await asyncio.sleep(RETRY_S)

    def _try_again(self, live: LiveRequest, now_s: float) -> None:
        standing, lost_s = live.submission.standing, live.lost_s
        if standing.timeout_s is not None:
            standing = replace(standing, timeout_s=live.submitted_s + standing.timeout_s - now_s)
            if standing.timeout_s is not None and standing.timeout_s <= 0:
                problem = "the deadline passed while there was no scheduler"
                return self._fail(live, RequestError(ErrorKind.DEADLINE_EXCEEDED, problem))
        limit_s = self._timeout_s if self._outbox is None else self.worker_timeout_s
        if lost_s is not None and now_s - lost_s > limit_s:
            problem = f"{LOST}; no other was found within {limit_s:g} s"
            return self._fail(live, unavailable(problem))
        if self._outbox is not None and not self._handover.is_announced:
            output = tuple(live.output_token_ids)
            again = replace(
                live.submission,
                standing=standing,
                output_token_ids=output,
                num_deaths=live.num_deaths,
            )
            live.is_submitted = True
            self._outbox.put_nowait(submit_to_proto(live.handle, again, is_again=not live.is_new))
        return None

    def _fail(self, live: LiveRequest, error: RequestError) -> None:
        self._live.pop(live.handle, None)
        live.end(error)
        live.wake()

    def _has_to_wait(self, live: LiveRequest, end: Finish | RequestError) -> bool:
        """Whether to retry: the next scheduler is not ready, or the last missed the loss.

        A new request is retried where a scheduler that ends has refused it.
        """
        if not isinstance(end, RequestError):
            return False
        if end.kind not in (ErrorKind.UNAVAILABLE, ErrorKind.CONFLICT):
            return False
        if live.lost_s is not None:
            live.is_submitted = False
        elif end.kind is ErrorKind.UNAVAILABLE and self.is_handing_over and not live.is_running:
            live.hold(time.monotonic())
        else:
            return False
        self._start_recovering()
        return True

    # --- received messages -----------------------------------------------------------------------

    def _deliver(self, response: scheduler_pb2.SessionResponse) -> None:
        if response.draining:
            log.info("the scheduler at %s will end: new requests wait for the next", self._address)
            self._handover.announce()
        handles = columns.unpack(response.handles, columns.UINT32, name="handles").tolist()
        token_ids = columns.unpack(response.token_ids, name="token_ids").tolist()
        if len(handles) != len(token_ids):
            raise columns.BadColumn(f"{len(handles)} handles but {len(token_ids)} token_ids")
        logprobs = logprobs_from_proto(response)
        touched = []
        for packed in response.prompt_outputs:
            live = self._live.get(packed.owner)
            if live is not None:
                self._deliver_prompt_output(live, packed)
        for position, (handle, token_id) in enumerate(zip(handles, token_ids, strict=True)):
            live = self._live.get(handle)
            if live is not None:  # else: closed here while tokens were in flight
                live.add(token_id, logprobs.get(position))
                touched.append(live)
        for admitted in response.admitted:
            live = self._live.get(admitted.handle)
            if live is not None:
                live.admit(admitted.cached_tokens)
        for finished in response.finished:
            live, end = self._live.get(finished.handle), finished_from_proto(finished)
            if live is not None and not self._has_to_wait(live, end):
                del self._live[finished.handle]
                live.end(end)
                touched.append(live)
        self._wakes.add(touched)

    def _deliver_prompt_output(self, live: LiveRequest, packed: types_pb2.PromptOutput) -> None:
        """Delivers what was found out about a prompt; what cannot be read ends its request."""
        try:
            live.add_prompt_output(PromptOutput.unpack(packed))
        except Exception as error:
            about = LoggedRequest(live.submission.request_id).extra
            log.error("a prompt's outputs cannot be read: %s", type(error).__name__, extra=about)
            self.close(live)
            problem = "internal error: the prompt's outputs cannot be read"
            self._fail(live, RequestError(ErrorKind.INTERNAL, problem))


async def _drain(outbox: Outbox) -> AsyncGenerator[scheduler_pb2.SessionRequest, None]:
    while (message := await outbox.get()) is not None:
        yield message
