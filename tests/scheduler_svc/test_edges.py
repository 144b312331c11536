"""Numbers at the edges of their types: refused by name or answered, and the scheduler lives on."""

import asyncio
import math
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagewire.v1 import debug_pb2, scheduler_pb2, types_pb2
from scheduler_svc.core import Policy
from simulator.workers.fake_worker import FakeModel
from tests.edges import Path, edges_of, name_of, numbers_in, with_number
from tests.scheduler_svc.conftest import Cluster, cluster
from wire.columns import pack

GENERATE = scheduler_pb2.SchedulerServiceGenerateRequest(
    prompt_token_ids=[1, 2, 3], sampling=types_pb2.SamplingParams(max_tokens=2, seed=1)
)
SUBMIT = scheduler_pb2.Submit(
    handle=7,
    request_id="edge",
    prompt_token_ids=pack([1, 2, 3]),
    sampling=types_pb2.SamplingParams(max_tokens=2, seed=1),
)
MODEL = FakeModel(max_model_len=64)
# What an edge may be answered with: it is refused by name, or it is not wrong at all.
ALLOWED = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,  # needs more blocks than there are
    grpc.StatusCode.DEADLINE_EXCEEDED,
}


def _edges(message: Any) -> list[tuple[Path, float]]:
    return [(path, v) for path in numbers_in(message.DESCRIPTOR) for v in edges_of(path[-1])]


async def _code_of_call(made: Cluster, request: Any) -> tuple[grpc.StatusCode, str]:
    try:
        async for _ in made.scheduler.Generate(request):
            pass
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or ""
    return grpc.StatusCode.OK, ""


class _Session:
    """One stream; requests are submitted one after the other."""

    def __init__(self, made: Cluster) -> None:
        self._sent: asyncio.Queue[scheduler_pb2.SessionRequest] = asyncio.Queue()
        self._call = made.scheduler.Session(self._requests())

    async def _requests(self) -> AsyncIterator[scheduler_pb2.SessionRequest]:
        while True:
            yield await self._sent.get()

    async def submit(self, submit: Any) -> tuple[grpc.StatusCode, str]:
        self._sent.put_nowait(scheduler_pb2.SessionRequest(submit=submit))
        while True:
            response = await self._call.read()
            for finished in response.finished:
                assert finished.handle == submit.handle
                code = next(c for c in grpc.StatusCode if c.value[0] == finished.status_code)
                return code, finished.message

    def close(self) -> None:
        self._call.cancel()


def _judge(path: Path, value: float, outcome: tuple[grpc.StatusCode, str]) -> None:
    code, message = outcome
    assert code in ALLOWED, f"{name_of(path)} = {value}: {code} {message}"
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        field = next((p.name for p in reversed(path) if p.name in message), None)
        assert field, f"{name_of(path)} = {value} is refused by another name: {message}"


async def test_generate_answers_every_edge_and_serves_the_next_request() -> None:
    async with cluster(MODEL) as made:
        for path, value in _edges(GENERATE):
            outcome = await _code_of_call(made, with_number(GENERATE, path, value))
            _judge(path, value, outcome)
        assert await _code_of_call(made, GENERATE) == (grpc.StatusCode.OK, "")
        assert made.engine.groups[0].num_recoveries == 0


async def test_a_session_answers_every_edge_and_goes_on() -> None:
    async with cluster(MODEL) as made:
        session = _Session(made)
        for path, value in _edges(SUBMIT):
            _judge(path, value, await session.submit(with_number(SUBMIT, path, value)))
        assert await session.submit(SUBMIT) == (grpc.StatusCode.OK, "")
        session.close()


def test_requests_with_several_edges_are_answered() -> None:
    """Two and three edges together: sums and differences of what is allowed one by one."""
    edges = _edges(GENERATE)

    @settings(
        max_examples=10, deadline=None, derandomize=True, suppress_health_check=[*HealthCheck]
    )
    @given(
        st.lists(st.lists(st.sampled_from(edges), min_size=2, max_size=3), min_size=8, max_size=8)
    )
    def all_answered(drawn: list[list[tuple[Path, float]]]) -> None:
        async def ask_all() -> None:
            async with cluster(MODEL) as made:
                for chosen in drawn:
                    request: Any = GENERATE
                    for path, value in chosen:
                        request = with_number(request, path, value)
                    code, message = await _code_of_call(made, request)
                    assert code in ALLOWED, f"{chosen}: {code} {message}"
                assert await _code_of_call(made, GENERATE) == (grpc.StatusCode.OK, "")

        asyncio.run(ask_all())

    all_answered()


async def test_a_huge_min_tokens_is_refused_by_name() -> None:
    async with cluster(MODEL) as made:
        for min_tokens in (2**32 - 1, 2**31):
            sampling = types_pb2.SamplingParams(min_tokens=min_tokens)
            request = scheduler_pb2.SchedulerServiceGenerateRequest(
                prompt_token_ids=[1, 2], sampling=sampling
            )
            code, message = await _code_of_call(made, request)
            assert code is grpc.StatusCode.INVALID_ARGUMENT and message.startswith("min_tokens: ")
        sampling = types_pb2.SamplingParams(min_tokens=2**31 - 1, stop_token_ids=range(100))
        request.sampling.CopyFrom(sampling)
        assert await _code_of_call(made, request) == (grpc.StatusCode.OK, "")


@pytest.mark.parametrize("timeout_s", [math.nan, math.inf, -math.inf, 1e300])
async def test_a_timeout_that_is_no_time_is_refused_and_later_deadlines_hold(
    timeout_s: float,
) -> None:
    async with cluster(MODEL) as made:
        session = _Session(made)
        bad = scheduler_pb2.Submit()
        bad.CopyFrom(SUBMIT)
        bad.timeout_s = timeout_s
        code, message = await session.submit(bad)
        assert code is grpc.StatusCode.INVALID_ARGUMENT and message.startswith("timeout_s: ")
        made.worker.hang_steps = 1
        late = scheduler_pb2.Submit()
        late.CopyFrom(SUBMIT)
        late.timeout_s = 0.05
        code, message = await session.submit(late)
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED
        session.close()


async def test_bytes_that_are_no_message_are_an_invalid_argument() -> None:
    async with cluster(MODEL) as made:
        for method in ("Generate", "Abort", "SetPriority", "GetStatus"):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await _call_raw(made, f"/pagewire.v1.SchedulerService/{method}")
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, method


async def test_a_session_message_that_cannot_be_read_ends_its_stream_with_a_status() -> None:
    async with cluster(MODEL) as made:
        call = made.channel.stream_stream("/pagewire.v1.SchedulerService/Session")()
        await call.write(b"\xff\xff\xff")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert await _code_of_call(made, GENERATE) == (grpc.StatusCode.OK, "")


async def _call_raw(made: Cluster, method: str) -> None:
    if method.endswith("Generate"):
        async for _ in made.channel.unary_stream(method)(b"\xff\xff\xff"):
            pass
    else:
        await made.channel.unary_unary(method)(b"\xff\xff\xff")


async def test_a_priority_is_refused_where_the_policy_ignores_it() -> None:
    request = scheduler_pb2.SchedulerServiceGenerateRequest()
    request.CopyFrom(GENERATE)
    request.priority = 7
    async with cluster(MODEL) as made:
        code, message = await _code_of_call(made, request)
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert message == "priority: 7 is of no use: the policy is fair, which ignores priorities"
        request.num_prompt_tokens = 3  # accepted before, by a scheduler of another policy
        assert await _code_of_call(made, request) == (grpc.StatusCode.OK, "")
    async with cluster(policy=Policy.PRIORITY) as made:
        request.ClearField("num_prompt_tokens")
        assert await _code_of_call(made, request) == (grpc.StatusCode.OK, "")


async def test_debug_calls_answer_every_edge() -> None:
    asks = {
        "ListRequests": debug_pb2.ListRequestsRequest(),
        "DumpBlockPool": debug_pb2.DumpBlockPoolRequest(),
        "ListSteps": debug_pb2.ListStepsRequest(),
    }
    async with cluster(MODEL) as made:
        for name, request in asks.items():
            for path, value in _edges(request):
                try:
                    await getattr(made.debug, name)(with_number(request, path, value))
                except grpc.aio.AioRpcError as error:
                    _judge(path, value, (error.code(), error.details() or ""))
