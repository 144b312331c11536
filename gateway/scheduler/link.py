"""The stream between this gateway and its scheduler, shared by all requests.

Submits and aborts are sent; once per step one message arrives with the new tokens of every request
of this gateway. The link delivers them to the requests and reconnects when the stream breaks; live
requests are then submitted again, prompt and output so far, and continue. The scheduler says which
instance it is: where the same one answers again a connection was lost and no scheduler died. The
link handles token ids, not text.
"""

import asyncio
import itertools
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from gateway.errors.request_errors import ErrorKind, RequestError, poison, unavailable
from gateway.request.generation import Finish
from gateway.scheduler.convert import (
    abort_to_proto,
    finished_from_proto,
    hello_to_proto,
    instance_of,
    logprobs_from_proto,
    submit_to_proto,
)
from gateway.scheduler.handover import Handover
from gateway.scheduler.live_request import LiveRequest, Submission
from gateway.scheduler.session_convert import end_session_to_proto
from gateway.scheduler.silence import StreamSilence
from gateway.scheduler.submitted import note_submitted
from gateway.scheduler.wakes import WakePace, WakeQueue
from pagewire.v1 import scheduler_pb2, types_pb2
from wire import columns
from wire.deaths import PeerLoss, loss_of
from wire.logs.request import LoggedRequest
from wire.prompt_outputs import PromptOutput
from wire.sealed import BadFrame, SealCheck, Sealer, sealed_call

FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 3.0
MAX_BACKOFF_TO_STANDBY_S = 0.4
RETRY_S = 0.1  # between attempts to submit lost requests again
WORKER_STARTS = 10.0  # times the limit without a scheduler: the one with a scheduler that waits
LOST = "lost the scheduler"
MAX_LOSSES = 3  # schedulers in a row without a token; the request may crash them
MOST_HELD = 4096  # new requests that wait for a scheduler
BEAT_S = 1.0  # between messages that only say that the stream goes on
METHOD = "/pagewire.v1.SchedulerService/Session"
NO_REQUEST = 0  # a handle; a scheduler that knows no hello refuses it under this one

log = logging.getLogger("gateway.scheduler.link")

Outbox = asyncio.Queue[scheduler_pb2.SessionRequest | None]  # None ends the stream


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
        self._channel = channel
        self._address = address
        self._on_lost = on_lost
        self._timeout_s = scheduler_timeout_s  # live requests wait this long for the next scheduler
        # And this long if that waits for its worker, which may have a large model to load.
        self.worker_timeout_s = WORKER_STARTS * scheduler_timeout_s
        self._recovering: asyncio.Task[None] | None = None
        self._live: dict[int, LiveRequest] = {}
        self._handles = itertools.count(NO_REQUEST + 1)
        self._gateway = secrets.randbits(64) | 1  # who this is, for as long as it lives
        self._instance: int | None = None  # of the scheduler that answered last; None: unknown
        self._silence = StreamSilence()  # of the scheduler on the stream that is open
        self._wakes = WakeQueue(WakePace(gather_s))
        self._refusal: RequestError | None = None  # of every request, since end_all
        self._outbox: Outbox | None = None  # set while a stream is open
        self._handover = Handover()
        self._max_backoff_s = MAX_BACKOFF_TO_STANDBY_S if has_standby else MAX_BACKOFF_S
        # Set when a stream opens or breaks, or adapters come or go; the waiter clears it.
        self.changed = asyncio.Event()

    @property
    def is_open(self) -> bool:
        """True if requests can be submitted."""
        return self._outbox is not None

    @property
    def is_handing_over(self) -> bool:
        """True if new requests wait: the stream is gone, or its scheduler was asked to end."""
        return self._handover.lasts(self.worker_timeout_s if self.is_open else self._timeout_s)

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

        After the loss of a stream, and while a scheduler hands over, it waits for the next one.
        """
        if self._refusal is not None:
            raise self._refusal
        if self._outbox is None or self._handover.is_announced:
            self._check_may_wait()
        live = LiveRequest(self._free_handle(), submission, time.monotonic())
        message = submit_to_proto(live.handle, submission)  # may raise: nothing is kept then
        self._live[live.handle] = live
        if self._outbox is None or self._handover.is_announced:
            live.hold(time.monotonic())
            self._start_recovering()
        else:
            self._outbox.put_nowait(message)
        note_submitted()
        return live

    def _check_may_wait(self) -> None:
        """Raises RequestError unless a new request can wait for a scheduler."""
        if not self.is_handing_over:
            raise unavailable("no connection to the scheduler")
        if sum(live.is_new for live in self._live.values()) >= MOST_HELD:
            raise unavailable(f"{MOST_HELD} requests wait for the connection to the scheduler")

    def close(self, live: LiveRequest) -> None:
        """Removes a request; aborts it if it still runs."""
        if self._live.pop(live.handle, None) is not None and self._outbox is not None:
            self._outbox.put_nowait(abort_to_proto(live.handle))

    def end_session(self, session_id: str, cache_salt: str) -> None:
        """Tells the scheduler, if there is one, that a client's session has ended."""
        if self._outbox is not None:
            self._outbox.put_nowait(end_session_to_proto(session_id, cache_salt))

    def end_all(self, error: RequestError) -> None:
        """Ends all requests with an error, and refuses new ones with it."""
        self._refusal = error
        for live in list(self._live.values()):
            self.close(live)
            live.end(error)
            live.wake()

    def _free_handle(self) -> int:
        # Handles wrap around after 2**32 requests; those of live requests are skipped.
        while (handle := next(self._handles) & 0xFFFFFFFF) in self._live or handle == NO_REQUEST:
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
                problem, loss = "it closed the stream", PeerLoss.OWN_END
            except grpc.aio.AioRpcError as error:
                problem, loss = f"{error.code().name}: {error.details()}", loss_of(error)
            except BadFrame as error:
                problem, loss = str(error), PeerLoss.HARMLESS
            except (DecodeError, columns.BadColumn) as error:
                problem, loss = f"its message cannot be read: {error}", PeerLoss.OWN_END
            except Exception as error:  # of ours: the stream begins anew, its requests go on
                log.exception("a message of the scheduler is not delivered")
                problem, loss = (
                    f"its message is not delivered: {type(error).__name__}",
                    PeerLoss.OWN_END,
                )
            finally:
                was_open, self._outbox = self.is_open, None
                if was_open:
                    self._handover.stream_ended()
            if was_open:
                self._on_lost()
            self._lose(problem, loss)
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, self._max_backoff_s)

    async def _open(self) -> AsyncGenerator[scheduler_pb2.SessionResponse, None]:
        outbox: Outbox = asyncio.Queue()
        check, call = SealCheck(), sealed_call(self._channel, METHOD, Sealer(), _drain(outbox))
        watching: asyncio.Task[None] | None = None
        try:
            await call.wait_for_connection()
            outbox.put_nowait(hello_to_proto(self._gateway))
            self._silence = StreamSilence()
            watching = asyncio.create_task(self._watch(outbox, call))
            async for frame in call:
                self._silence.end()
                check.check(frame)
                response = scheduler_pb2.SessionResponse.FromString(frame)
                if self._outbox is None and (instance := instance_of(response)) is not None:
                    self._answered(instance, outbox)
                yield response
        except asyncio.CancelledError:  # gRPC raises it for a call that was cancelled, too
            if not self._silence.is_over:
                raise
            raise BadFrame(self._silence.problem) from None
        finally:
            if watching is not None:
                watching.cancel()
            # gRPC's task that reads the outbox outlives a stream that the other side has ended.
            outbox.put_nowait(None)
            call.cancel()

    def _answered(self, instance: int, outbox: Outbox) -> None:
        """Opens the link to the scheduler that has answered; judges the loss before it.

        An instance of 0 is a scheduler that does not say which it is: another one, perhaps.
        """
        is_other = not instance or instance != self._instance
        self._instance, self._outbox = instance, outbox
        for live in list(self._live.values()):
            live.judge(is_other)
            if live.is_poison:
                self._fail(live, poison(live.num_deaths_in_all))
            elif live.num_losses >= MAX_LOSSES:
                self._fail(live, unavailable(LOST))
        self.changed.set()
        log.info("connected to the scheduler at %s", self._address)

    async def _watch(self, outbox: Outbox, call: Any) -> None:
        """Sends a message each second, and ends a stream on which none comes."""
        while True:
            await asyncio.sleep(BEAT_S)
            if self.is_open and not self._instance:
                return  # a scheduler that does not send any
            if self.is_open:
                outbox.put_nowait(scheduler_pb2.SessionRequest())
            if self._silence.tick(BEAT_S):
                call.cancel()
                return

    # --- when the scheduler is gone --------------------------------------------------------------

    def _lose(self, problem: str, loss: PeerLoss) -> None:
        """Handles the loss of the stream, and of the scheduler's state of our requests.

        The gateway holds prompt and tokens of each: they wait for a scheduler for a limited time.
        Which one answers says whether this one has died.
        """
        if self._live:
            log.warning(
                "lost the scheduler with %d requests live, at %s: %s",
                len(self._live),
                self._address,
                problem,
            )
        for live in list(self._live.values()):
            live.lose(time.monotonic(), loss)
            if not self._timeout_s:
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
        """True if it is to wait: the next scheduler is not ready, or the last missed the loss.

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
        if response.adapters_changed:
            self.changed.set()
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
