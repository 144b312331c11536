"""DebugService of the gateway: live requests as text, without prompts and outputs."""

from collections.abc import AsyncIterator
from typing import NoReturn

import grpc

from gateway.errors import limits
from gateway.errors.request_errors import ErrorKind, RequestError, invalid, shown
from gateway.grpc_api.statuses import Context, RefusalsAsStatuses
from gateway.pipeline.pipeline import Pipeline
from gateway.request.generation import SamplingParams
from gateway.scheduler.progress import RequestProgress
from pagewire.v1 import debug_pb2 as pb
from pagewire.v1 import debug_pb2_grpc

DEFAULT_ENTRIES = 100
ASK_TIMEOUT_S = 10.0  # of the scheduler


class DebugService(debug_pb2_grpc.DebugServiceServicer):
    """The gateway's view of requests: ids, counts and times."""

    def __init__(self, pipeline: Pipeline, scheduler: grpc.aio.Channel) -> None:
        self._pipeline = pipeline
        self._scheduler: debug_pb2_grpc.DebugServiceAsyncStub = debug_pb2_grpc.DebugServiceStub(
            scheduler
        )

    async def ListRequests(
        self, request: pb.ListRequestsRequest, context: Context
    ) -> pb.ListRequestsResponse:
        """Live requests, oldest first."""
        async with RefusalsAsStatuses(context):
            limit = request.limit or DEFAULT_ENTRIES
            if limit > limits.MAX_DEBUG_ENTRIES:
                raise invalid("limit", f"{limit} exceeds {limits.MAX_DEBUG_ENTRIES}")
            live = self._pipeline.live
            shown = [_summary(progress, self._pipeline.now()) for progress in live[:limit]]
            return pb.ListRequestsResponse(requests=shown, total=len(live))

    async def DescribeRequest(
        self, request: pb.DescribeRequestRequest, context: Context
    ) -> pb.DescribeRequestResponse:
        """One live request in full. Aborts with NOT_FOUND when no live request has the id."""
        async with RefusalsAsStatuses(context):
            now_s = self._pipeline.now()
            for progress in self._pipeline.live:
                if progress.request.request_id == request.request_id:
                    return pb.DescribeRequestResponse(
                        request=_summary(progress, now_s),
                        sampling=_sampling_in_words(progress),
                        story=_story(progress, now_s),
                    )
            problem = f"request_id: {shown(request.request_id)} is not live in this gateway"
            raise RequestError(ErrorKind.NOT_FOUND, problem, field="request_id")

    async def Explain(self, request: pb.ExplainRequest, context: Context) -> pb.ExplainResponse:
        """The scheduler's answer, with what this gateway adds to the way of the first token."""
        async with RefusalsAsStatuses(context):
            answer = await self._explained(request)
            times = self._pipeline.first_tokens.find(request.request_id)
            if times is not None:
                path = times.path(answer.first_token)
                del answer.first_token[:]
                answer.first_token.extend(path)
            return answer

    async def _explained(self, request: pb.ExplainRequest) -> pb.ExplainResponse:
        """The scheduler's explanation. Raises RequestError with its reason."""
        try:
            return await self._scheduler.Explain(request, timeout=ASK_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            known = {
                grpc.StatusCode.NOT_FOUND: ErrorKind.NOT_FOUND,
                grpc.StatusCode.INVALID_ARGUMENT: ErrorKind.INVALID,
            }
            kind = known.get(error.code(), ErrorKind.UNAVAILABLE)
            problem = f"the scheduler: {error.details()}"
            raise RequestError(kind, problem) from error

    async def DumpBlockPool(
        self, request: pb.DumpBlockPoolRequest, context: Context
    ) -> pb.DumpBlockPoolResponse:
        """Answers UNIMPLEMENTED: only the scheduler knows."""
        async with RefusalsAsStatuses(context):
            _ask("DumpBlockPool: a gateway has no KV blocks; ask the scheduler")

    async def ListSteps(
        self, request: pb.ListStepsRequest, context: Context
    ) -> pb.ListStepsResponse:
        """Answers UNIMPLEMENTED: only the scheduler knows."""
        async with RefusalsAsStatuses(context):
            _ask("ListSteps: a gateway runs no steps; ask the scheduler or a worker")

    async def ProfileSteps(
        self, request: pb.ProfileStepsRequest, context: Context
    ) -> AsyncIterator[pb.ProfileStepsResponse]:
        """Answers UNIMPLEMENTED: steps are the scheduler's and the worker's."""
        async with RefusalsAsStatuses(context):
            _ask("ProfileSteps: a gateway runs no steps; ask the scheduler")
        yield pb.ProfileStepsResponse()


def _ask(whom: str) -> NoReturn:
    raise RequestError(ErrorKind.UNIMPLEMENTED, whom)


def _summary(progress: RequestProgress, now_s: float) -> pb.RequestSummary:
    # Only the scheduler knows whether a request with tokens runs or is preempted.
    state = "waiting" if progress.first_token_s is None else "running"
    age_s = now_s - progress.started_s
    request_id = progress.request.request_id
    return pb.RequestSummary(
        request_id=request_id,
        state=state,
        num_prompt_tokens=progress.num_prompt_tokens,
        num_output_tokens=progress.num_output_tokens,
        age_s=age_s,
        summary=(
            f"{request_id} is {state}: {progress.num_prompt_tokens} prompt tokens, "
            f"{progress.num_output_tokens} output tokens, {age_s:.1f} s old"
        ),
    )


def _sampling_in_words(progress: RequestProgress) -> str:
    sampling: SamplingParams = progress.request.sampling
    given = {
        name: getattr(sampling, name)
        for name in SamplingParams.__dataclass_fields__
        if getattr(sampling, name) not in (None, ())
    }
    words = [
        f"{len(value)} {name}" if isinstance(value, tuple) else f"{name} {value}"
        for name, value in given.items()
    ]
    if progress.request.stop:
        words.append(f"{len(progress.request.stop)} stop strings")
    if progress.request.bad_words:
        words.append(f"{len(progress.request.bad_words)} bad words")
    return ", ".join(words) or "all defaults"


def _story(progress: RequestProgress, now_s: float) -> list[str]:
    lines = [f"submitted to the scheduler {now_s - progress.started_s:.3f} s ago"]
    if progress.first_token_s is None:
        return [*lines, "waits for its first token; the scheduler can say why"]
    ttft_s = progress.first_token_s - progress.started_s
    return [*lines, f"first token after {ttft_s:.3f} s, {progress.num_output_tokens} so far"]
