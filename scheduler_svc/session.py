"""The streams of gateways: each carries all requests of one gateway, named by handles.

A gateway says who it is and hears which scheduler serves it. So it can tell a lost connection from
a scheduler that died, and a new stream of the same gateway ends the old one, whose requests it
submits again. Messages come each second in both directions: a stream that is silent is given up.
"""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass

import grpc
import numpy as np
from numpy.typing import NDArray

from pagewire.v1 import scheduler_pb2
from scheduler_svc.clients.outbox import Parcel
from scheduler_svc.clients.refused_call import RefusedCall
from scheduler_svc.containment import cause_of, message_of
from scheduler_svc.convert import Origin, to_finished, to_prompt_output, to_tokens
from scheduler_svc.engine import Engine
from wire.columns import BadColumn, unpack
from wire.logs.request import LoggedRequest
from wire.requests.numbers import BadNumber, check_numbers
from wire.sealed import BadFrame
from wire.tracing.context import context_from_proto

MAX_REFUSALS = 1024  # of one session, not yet sent
BEAT_S = 1.0
MOST_SILENCE_S = 30.0  # of a gateway that sends beats
SHUTTING_DOWN = "this scheduler is shutting down"
STANDS_BY = "this scheduler stands by for another one"
HAS_ANOTHER = "this gateway has opened another stream"
logger = logging.getLogger(__name__)

SessionContext = grpc.aio.ServicerContext[
    scheduler_pb2.SessionRequest, scheduler_pb2.SessionResponse
]
# Submits a request; returns why it is refused, if it is.
Submit = Callable[[scheduler_pb2.Submit, NDArray[np.int32], Origin], RefusedCall | None]


@dataclass(frozen=True, slots=True)
class SessionEnd:
    """The end of a stream, as its gateway hears of it."""

    code: grpc.StatusCode
    message: str


class GatewaySession:
    """One stream: its live requests, and what is to be sent to its gateway."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.client, self.outbox = engine.open_client()
        self.live: dict[int, str] = {}  # handle to request id
        # Messages other than tokens, in order. Bounded: a client that reads no refusals is not read
        # either.
        self.notices: asyncio.Queue[scheduler_pb2.SessionResponse | SessionEnd] = asyncio.Queue(
            MAX_REFUSALS
        )
        self.gateway = 0  # who it is; 0: it has not said so
        self.silent_s = 0.0
        self.is_over = False

    def notify(self, notice: scheduler_pb2.SessionResponse | SessionEnd) -> None:
        """Sends something, unless the gateway does not read: the end of the server ends it, too."""
        with contextlib.suppress(asyncio.QueueFull):
            self.notices.put_nowait(notice)

    def close(self) -> None:
        """Aborts what is live; calls after the first have no effect."""
        if not self.is_over:
            self.is_over = True
            self._engine.close_client(self.client, self.live.values())
            self.live.clear()

    def take(self) -> asyncio.Task[Parcel]:
        """The task that waits for the next tokens and ends."""
        return asyncio.create_task(self.outbox.take())


class Sessions:
    """All open streams of one scheduler."""

    def __init__(self, engine: Engine, submit: Submit) -> None:
        self.instance = secrets.randbits(64) | 1  # of this process; never 0
        self._engine = engine
        self._submit = submit
        self._open: dict[int, GatewaySession] = {}  # by client
        self._is_draining = False
        engine.adapters.on_change = self._adapters_changed

    @property
    def num_open(self) -> int:
        """Requests whose end has not been sent."""
        return sum(len(session.live) for session in self._open.values())

    def drain(self) -> None:
        """Tells gateways that this scheduler will end: they keep new requests for the next."""
        self._is_draining = True
        self._notify(scheduler_pb2.SessionResponse(draining=True))

    def end(self) -> None:
        """Ends all streams; gateways continue their requests on the next scheduler."""
        self._notify(SessionEnd(grpc.StatusCode.UNAVAILABLE, SHUTTING_DOWN))

    def _adapters_changed(self) -> None:
        """Has gateways ask for the adapters anew."""
        self._notify(scheduler_pb2.SessionResponse(adapters_changed=True))

    def _notify(self, notice: scheduler_pb2.SessionResponse | SessionEnd) -> None:
        for session in self._open.values():
            session.notify(notice)

    async def serve(
        self, requests: AsyncIterator[scheduler_pb2.SessionRequest], context: SessionContext
    ) -> AsyncGenerator[scheduler_pb2.SessionResponse, None]:
        """Serves a gateway until its stream ends, then aborts its remaining requests."""
        if self._engine.stands_by:
            yield scheduler_pb2.SessionResponse(draining=True)  # so nothing is submitted here
            await context.abort(grpc.StatusCode.UNAVAILABLE, STANDS_BY)
        session = GatewaySession(self._engine)
        self._open[session.client] = session
        if self._is_draining:
            session.notify(scheduler_pb2.SessionResponse(draining=True))
        reading = asyncio.create_task(self._read(requests, session))
        taking = session.take()
        noticing = asyncio.create_task(session.notices.get())
        beating = asyncio.create_task(_beat(session))
        try:
            while not reading.done():
                done, _ = await asyncio.wait(
                    {reading, taking, noticing}, return_when=asyncio.FIRST_COMPLETED
                )
                if noticing in done:
                    if isinstance(notice := noticing.result(), SessionEnd):
                        await context.abort(notice.code, notice.message)
                    yield notice
                    noticing = asyncio.create_task(session.notices.get())
                if taking in done:
                    parcel = taking.result()
                    taking = session.take()
                    yield self._to_response(parcel, session.live)
            await _abort_if_damaged(reading, context)
        finally:
            del self._open[session.client]
            session.close()
            for task in (taking, noticing, reading, beating):
                task.cancel()
            await asyncio.gather(taking, noticing, reading, beating, return_exceptions=True)

    def _to_response(self, parcel: Parcel, live: dict[int, str]) -> scheduler_pb2.SessionResponse:
        """A parcel as a message; what cannot be converted ends its own request alone."""
        response = to_tokens(parcel.handles, parcel.token_ids, parcel.logprobs)
        for prompt_output in parcel.prompt_outputs:
            try:
                response.prompt_outputs.append(to_prompt_output(prompt_output))
            except Exception as error:
                request_id = live.pop(prompt_output.owner, None)
                about = LoggedRequest(
                    request_id or "", self._engine.spans.trace_id(request_id or "")
                )
                problem = "a prompt's outputs are not told: %s"
                logger.error(problem, cause_of(error), extra=about.extra)
                if request_id is not None:
                    self._engine.abort(request_id)
                    refusal = RefusedCall(grpc.StatusCode.INTERNAL, message_of(error))
                    response.finished.append(refusal.to_finished(prompt_output.owner))
        for admission in parcel.admitted:
            response.admitted.add(
                handle=admission.handle, cached_tokens=admission.num_cached_tokens
            )
        for ended in parcel.ended:
            live.pop(ended.finished.request.handle, None)
            response.finished.append(to_finished(ended.finished, ended.status_code))
        return response

    async def _read(
        self, requests: AsyncIterator[scheduler_pb2.SessionRequest], session: GatewaySession
    ) -> None:
        async for message in requests:
            session.silent_s = 0.0
            if session.is_over:  # the gateway has another stream
                return
            match message.WhichOneof("kind"):
                case "hello":
                    self._greet(session, message.hello)
                case "abort":
                    request_id = session.live.pop(message.abort.handle, None)
                    if request_id is not None:
                        self._engine.abort(request_id)
                case "end_session":
                    ended = message.end_session
                    self._engine.end_session(ended.session_id, ended.cache_salt)
                case "submit":
                    await self._take(session, message.submit)

    def _greet(self, session: GatewaySession, hello: scheduler_pb2.SessionHello) -> None:
        """Answers a hello, and ends the gateway's older stream: it may not know that it is lost."""
        session.gateway = hello.gateway
        for other in list(self._open.values()):
            if other is not session and other.gateway == hello.gateway != 0:
                other.close()
                other.notify(SessionEnd(grpc.StatusCode.ABORTED, HAS_ANOTHER))
        greeting = scheduler_pb2.SessionGreeting(instance=self.instance)
        session.notify(scheduler_pb2.SessionResponse(greeting=greeting))

    async def _take(self, session: GatewaySession, submit: scheduler_pb2.Submit) -> None:
        refusal = self._submit_to(session, submit)
        if refusal is None:
            session.live[submit.handle] = submit.request_id
            return
        self._engine.counts.refused(refusal.code)
        finished = refusal.to_finished(submit.handle)
        await session.notices.put(scheduler_pb2.SessionResponse(finished=[finished]))

    def _submit_to(
        self, session: GatewaySession, submit: scheduler_pb2.Submit
    ) -> RefusedCall | None:
        if submit.handle in session.live:
            message = f"handle {submit.handle} is live already"
            return RefusedCall(grpc.StatusCode.ALREADY_EXISTS, message)
        try:
            check_numbers(submit)
            token_ids = unpack(submit.prompt_token_ids, name="prompt_token_ids")
        except (BadNumber, BadColumn) as error:
            return RefusedCall(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        timeout_s = submit.timeout_s if submit.HasField("timeout_s") else None
        trace = context_from_proto(submit.trace) if submit.HasField("trace") else None
        origin = Origin(submit.request_id, session.client, submit.handle, timeout_s, trace)
        return self._submit(submit, token_ids.astype(np.int32, copy=False), origin)


async def _beat(session: GatewaySession) -> None:
    """Sends a message each second to a gateway that said who it is, and expects its own."""
    while True:
        await asyncio.sleep(BEAT_S)
        if not session.gateway:
            continue
        session.notify(scheduler_pb2.SessionResponse())
        session.silent_s += BEAT_S  # however long this process itself stood still
        if session.silent_s > MOST_SILENCE_S:
            problem = f"no message from the gateway for {session.silent_s:.0f} s"
            session.notify(SessionEnd(grpc.StatusCode.DATA_LOSS, problem))
            return


async def _abort_if_damaged(reading: "asyncio.Task[None]", context: SessionContext) -> None:
    """Ends the stream with the reason, if a frame of the gateway was not the next one."""
    if reading.cancelled() or not isinstance(error := reading.exception(), BadFrame):
        return
    logger.warning("a gateway's stream ends: %s", error)
    await context.abort(grpc.StatusCode.DATA_LOSS, str(error))
