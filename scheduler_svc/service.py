"""SchedulerService: receives requests and sends tokens; the engine makes every decision.

One table maps errors to gRPC statuses.
"""

import logging
import os
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

import grpc
import numpy as np
from numpy.typing import NDArray

from pagewire.v1 import scheduler_pb2, scheduler_pb2_grpc, types_pb2
from scheduler_svc.adapters import AdapterRefused
from scheduler_svc.clients.outbox import Outbox, RequestEnd
from scheduler_svc.clients.refused_call import RefusedCall
from scheduler_svc.containment import cause_of, message_of
from scheduler_svc.convert import (
    FINISH_REASONS,
    ClientRequest,
    Origin,
    to_request,
    to_token_logprobs,
    to_usage,
)
from scheduler_svc.core import Policy, RefusalKind, Refused
from scheduler_svc.engine import Engine, Failed, NotReady, QueueFull
from scheduler_svc.pictures import BadPicture
from scheduler_svc.sampling import BadSampling
from scheduler_svc.session import SHUTTING_DOWN, STANDS_BY, SessionContext, Sessions
from scheduler_svc.status import status_of
from wire.logs.request import LoggedRequest
from wire.prompt_outputs import HiddenMean
from wire.sealed import sealing
from wire.tracing.context import context_of

SERVICE_NAME = "pagewire.v1.SchedulerService"
MAX_REQUEST_ID_BYTES = 256
SHUT_DOWN = "this scheduler has shut down before the output ended"
NO_WORKER = "no worker has attached yet; GetStatus says why"  # clients of a gateway read this too
_REFUSALS = {
    RefusalKind.INVALID: grpc.StatusCode.INVALID_ARGUMENT,
    RefusalKind.DUPLICATE: grpc.StatusCode.ALREADY_EXISTS,
    RefusalKind.NEVER_FITS: grpc.StatusCode.FAILED_PRECONDITION,
    RefusalKind.EXPIRED: grpc.StatusCode.DEADLINE_EXCEEDED,
}
MOST_SESSIONS = 256  # of each worker group, in one status
logger = logging.getLogger(__name__)
_CODES = {code.value[0]: code for code in grpc.StatusCode}

GenerateContext = grpc.aio.ServicerContext[
    scheduler_pb2.SchedulerServiceGenerateRequest, scheduler_pb2.SchedulerServiceGenerateResponse
]


class SchedulerService(scheduler_pb2_grpc.SchedulerServiceServicer):
    """The token-level API."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._is_draining = False
        self.sessions = Sessions(engine, self._submit)
        self._calls: dict[int, Outbox] = {}  # by client: one call per request
        self._called: dict[int, list[str]] = {}  # by client: the request of each call

    # --- the end of the process ------------------------------------------------------------------

    @property
    def num_open(self) -> int:
        """Requests whose end has not been sent."""
        return self.sessions.num_open + sum(map(len, self._called.values()))

    def drain(self) -> None:
        """Refuses new requests from now on, and tells gateways, which keep them for the next."""
        if not self._is_draining:
            self._is_draining = True
            self.sessions.drain()

    def end_calls(self) -> None:
        """Ends all calls with UNAVAILABLE; gateways continue theirs on the next scheduler."""
        self.drain()
        self.sessions.end()
        for outbox in self._calls.values():
            outbox.close()

    # --- one stream per gateway ------------------------------------------------------------------

    async def Session(
        self, request_iterator: AsyncIterator[scheduler_pb2.SessionRequest], context: SessionContext
    ) -> AsyncGenerator[scheduler_pb2.SessionResponse, None]:
        """Serves a gateway until its stream ends, then aborts its remaining requests."""
        async with aclosing(self.sessions.serve(request_iterator, context)) as responses:
            async for response in responses:
                yield response

    # --- one call per request --------------------------------------------------------------------

    async def Generate(
        self, request: scheduler_pb2.SchedulerServiceGenerateRequest, context: GenerateContext
    ) -> AsyncIterator[scheduler_pb2.SchedulerServiceGenerateResponse]:
        """Runs one request and streams its tokens as they are sampled."""
        request_id = request.request_id or f"generate-{uuid.uuid4().hex}"
        client, outbox = self._engine.open_client()
        mine: list[str] = []  # empty until accepted: a refused id may be another client's
        self._called[client], self._calls[client] = mine, outbox
        try:
            trace = context_of(_text_metadata(context))
            origin = Origin(request_id, client, 0, context.time_remaining(), trace)
            refusal = self._submit_call(request, origin)
            if refusal is not None:
                self._engine.counts.refused(refusal.code)
                await refusal.abort(context)
            mine.append(request_id)
            async for response in _responses(outbox, request_id, request.sampling, context):
                yield response
        finally:
            del self._called[client], self._calls[client]
            self._engine.close_client(client, mine)

    def _submit_call(
        self, request: scheduler_pb2.SchedulerServiceGenerateRequest, origin: Origin
    ) -> RefusedCall | None:
        return self._submit(request, np.array(request.prompt_token_ids, dtype=np.int32), origin)

    def _submit(
        self, submitted: ClientRequest, token_ids: NDArray[np.int32], origin: Origin
    ) -> RefusedCall | None:
        """Submits a request to the engine; returns the refusal if it is not accepted."""
        arrival_s, spans = time.monotonic(), self._engine.spans
        refusal = self._try_submit(submitted, token_ids, origin, arrival_s)
        if refusal is None:
            spans.accepted(origin.request_id, origin.trace, arrival_s)
        else:
            spans.refused(origin.request_id, origin.trace, arrival_s, refusal.code.name)
        return refusal

    def _try_submit(
        self,
        submitted: ClientRequest,
        token_ids: NDArray[np.int32],
        origin: Origin,
        arrival_s: float,
    ) -> RefusedCall | None:
        if self._is_draining:
            return RefusedCall(grpc.StatusCode.UNAVAILABLE, SHUTTING_DOWN)
        if self._engine.stands_by:
            return RefusedCall(grpc.StatusCode.UNAVAILABLE, STANDS_BY)
        invalid = grpc.StatusCode.INVALID_ARGUMENT
        if not 0 < len(origin.request_id.encode()) <= MAX_REQUEST_ID_BYTES:
            return RefusedCall(invalid, f"request_id must have 1 to {MAX_REQUEST_ID_BYTES} bytes")
        # A request that was accepted before goes on, whatever the policy is now.
        is_new = not submitted.HasField("num_prompt_tokens")
        if is_new and submitted.priority and self._engine.config.policy is not Policy.PRIORITY:
            problem = f"priority: {submitted.priority} is of no use: {self._ignores()}"
            return RefusedCall(invalid, problem)
        drawn_seed = int.from_bytes(os.urandom(8), "little")
        try:
            self._engine.submit(
                to_request(
                    submitted,
                    token_ids,
                    origin,
                    drawn_seed=drawn_seed,
                    vocab_size=self._engine.vocab_size,
                    arrival_s=arrival_s,
                )
            )
        except (BadSampling, BadPicture) as error:
            return RefusedCall(invalid, str(error))
        except QueueFull as error:
            code = grpc.StatusCode.RESOURCE_EXHAUSTED
            return RefusedCall(code, str(error), error.retry_after_s)
        except Refused as error:
            return RefusedCall(_REFUSALS[error.kind], str(error))
        except NotReady:
            return RefusedCall(grpc.StatusCode.UNAVAILABLE, NO_WORKER)
        except Failed as error:
            return RefusedCall(grpc.StatusCode.INTERNAL, str(error))
        except Exception as error:  # nothing of it is in the core
            about = LoggedRequest(origin.request_id).extra
            logger.error("a request is refused by an exception: %s", cause_of(error), extra=about)
            return RefusedCall(grpc.StatusCode.INTERNAL, message_of(error))
        return None

    def _ignores(self) -> str:
        return f"the policy is {self._engine.config.policy.value}, which ignores priorities"

    # --- the rest --------------------------------------------------------------------------------

    async def Abort(
        self,
        request: scheduler_pb2.AbortRequest,
        context: grpc.aio.ServicerContext[scheduler_pb2.AbortRequest, scheduler_pb2.AbortResponse],
    ) -> scheduler_pb2.AbortResponse:
        """Aborts requests by id and notifies each request's own client."""
        aborted = [i for i in request.request_ids if self._engine.abort_and_tell(i)]
        return scheduler_pb2.AbortResponse(aborted=aborted)

    async def SetPriority(
        self,
        request: scheduler_pb2.SetPriorityRequest,
        context: grpc.aio.ServicerContext[
            scheduler_pb2.SetPriorityRequest, scheduler_pb2.SetPriorityResponse
        ],
    ) -> scheduler_pb2.SetPriorityResponse:
        """Changes the priority of a live request."""
        if self._engine.config.policy is not Policy.PRIORITY:
            message = f"priority: {self._ignores()}"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, message)
        if not self._engine.set_priority(request.request_id, request.priority):
            message = f"request_id {request.request_id!r} is not live"
            await context.abort(grpc.StatusCode.NOT_FOUND, message)
        return scheduler_pb2.SetPriorityResponse()

    async def ResetPrefixCache(
        self,
        request: scheduler_pb2.ResetPrefixCacheRequest,
        context: grpc.aio.ServicerContext[
            scheduler_pb2.ResetPrefixCacheRequest, scheduler_pb2.ResetPrefixCacheResponse
        ],
    ) -> scheduler_pb2.ResetPrefixCacheResponse:
        """Empties the prefix cache; returns the number of blocks forgotten."""
        num_blocks = self._engine.reset_prefix_cache()
        return scheduler_pb2.ResetPrefixCacheResponse(num_blocks=num_blocks)

    async def LoadAdapter(
        self,
        request: scheduler_pb2.SchedulerServiceLoadAdapterRequest,
        context: grpc.aio.ServicerContext[
            scheduler_pb2.SchedulerServiceLoadAdapterRequest,
            scheduler_pb2.SchedulerServiceLoadAdapterResponse,
        ],
    ) -> scheduler_pb2.SchedulerServiceLoadAdapterResponse:
        """Has the workers read an adapter, which requests may name from now on."""
        try:
            loaded = await self._engine.load_adapter(
                request.name, request.path, replaces=request.replaces
            )
        except AdapterRefused as error:
            await context.abort(error.code, str(error))
        return scheduler_pb2.SchedulerServiceLoadAdapterResponse(
            adapter=types_pb2.Adapter(**loaded.fields())
        )

    async def UnloadAdapter(
        self,
        request: scheduler_pb2.SchedulerServiceUnloadAdapterRequest,
        context: grpc.aio.ServicerContext[
            scheduler_pb2.SchedulerServiceUnloadAdapterRequest,
            scheduler_pb2.SchedulerServiceUnloadAdapterResponse,
        ],
    ) -> scheduler_pb2.SchedulerServiceUnloadAdapterResponse:
        """Takes an adapter's name away; its live requests go on."""
        try:
            await self._engine.unload_adapter(request.name)
        except AdapterRefused as error:
            await context.abort(error.code, str(error))
        return scheduler_pb2.SchedulerServiceUnloadAdapterResponse()

    async def GetStatus(
        self,
        request: scheduler_pb2.GetStatusRequest,
        context: grpc.aio.ServicerContext[
            scheduler_pb2.GetStatusRequest, scheduler_pb2.GetStatusResponse
        ],
    ) -> scheduler_pb2.GetStatusResponse:
        """Counters and gauges."""
        status = status_of(self._engine, most_sessions=min(request.most_sessions, MOST_SESSIONS))
        if self._is_draining:
            status.ready, status.reason = False, SHUTTING_DOWN
        return status


def _text_metadata(context: GenerateContext) -> dict[str, str]:
    given = context.invocation_metadata() or ()
    return {str(name): value for name, value in given if isinstance(value, str)}


async def _responses(
    outbox: Outbox, request_id: str, sampling: types_pb2.SamplingParams, context: GenerateContext
) -> AsyncIterator[scheduler_pb2.SchedulerServiceGenerateResponse]:
    ended: RequestEnd | None = None
    hidden = HiddenMean()
    while ended is None:
        parcel = await outbox.take()
        ended = parcel.ended[0] if parcel.ended else None
        response = scheduler_pb2.SchedulerServiceGenerateResponse(
            request_id=request_id, token_ids=parcel.token_ids.tolist()
        )
        for prompt_output in parcel.prompt_outputs:
            if prompt_output.logprobs is None:
                hidden.add(prompt_output)
            else:
                told = to_token_logprobs(prompt_output.logprobs, sampling.prompt_logprobs)
                response.prompt_logprobs.extend(told)
        if ended is None and outbox.is_closed:
            await context.abort(grpc.StatusCode.UNAVAILABLE, SHUT_DOWN)
        if ended is None and not (len(parcel.token_ids) or response.prompt_logprobs):
            continue  # an admission, or part of a pooled prompt: nothing to send
        if parcel.logprobs is not None:
            num_top = len(sampling.logprob_token_ids) or sampling.logprobs
            response.logprobs.extend(to_token_logprobs(parcel.logprobs, num_top))
        if ended is not None:
            if ended.status_code:
                await context.abort(_CODES[ended.status_code], ended.finished.message)
            response.finish_reason = FINISH_REASONS[ended.finished.reason]
            if ended.finished.stop_token_id is not None:
                response.stop_token_id = ended.finished.stop_token_id
            response.usage.CopyFrom(to_usage(ended.finished))
            if (pooled := hidden.value()) is not None:
                response.hidden.extend(pooled.tolist())
        yield response


def add_to_server(service: SchedulerService, server: grpc.aio.Server) -> None:
    """Registers the handlers; the frames of Session are sealed."""
    scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(service, server)
    session = sealing(service.sessions.serve, scheduler_pb2.SessionRequest.FromString)
    server.add_registered_method_handlers(SERVICE_NAME, {"Session": session})
