"""A call that is sent again under its key gets the first one's answer, and nothing runs twice."""

import asyncio
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message

from gateway.errors.request_errors import ErrorKind, RequestError
from gateway.grpc_api.recent_calls import KEPT_S, MAX_LEFT, CallKey, RecentCalls
from pagewire.v1 import inference_pb2 as pb
from pagewire.v1.inference_pb2_grpc import InferenceServiceStub
from tests.gateway.conftest import Running, eventually
from tests.pace import patience

pytestmark = pytest.mark.asyncio(loop_scope="module")

KEY = CallKey("", "k")


def request(key: str, prompt: str = "Hello", **options: Any) -> pb.GenerateRequest:
    made = pb.GenerateRequest(prompt=pb.Prompt(text=prompt))
    made.options.MergeFrom(pb.GenerationOptions(idempotency_key=key, **options))
    return made


def stub_of(running: Running) -> Any:
    return InferenceServiceStub(running.channel)


async def test_the_answer_of_a_call_that_ended_is_kept(running: Running) -> None:
    stub = stub_of(running)
    first = await stub.Generate(request("ended"))
    again = await stub.Generate(request("ended", num_deaths=1))
    assert again == first and first.output.text == "Hello world"
    assert len(running.scheduler.submits) == 1
    other = await stub.Generate(request("other"))
    assert other.request_id != first.request_id and len(running.scheduler.submits) == 2


async def test_a_call_attaches_to_the_one_that_runs(running: Running) -> None:
    stub, scheduler = stub_of(running), running.scheduler
    scheduler.hangs_after = 1
    calls = [asyncio.ensure_future(stub.Generate(request("runs"))) for _ in range(3)]
    await eventually(lambda: len(scheduler.submits) == 1, "one is submitted")
    await asyncio.sleep(0.1)
    scheduler.finish_hanging()
    answers = await asyncio.gather(*calls)
    assert answers[0] == answers[1] == answers[2]
    assert len(scheduler.submits) == 1


async def test_a_call_whose_connection_is_lost_runs_on_for_the_next_one(running: Running) -> None:
    scheduler = running.scheduler
    scheduler.hangs_after = 1
    async with grpc.aio.insecure_channel(running.grpc_target) as doomed:
        lost = asyncio.ensure_future(InferenceServiceStub(doomed).Generate(request("lost")))
        await eventually(lambda: len(scheduler.submits) == 1, "it is submitted")
    with pytest.raises((grpc.aio.AioRpcError, asyncio.CancelledError)):
        await lost
    again = asyncio.ensure_future(stub_of(running).Generate(request("lost")))
    await asyncio.sleep(0.1)
    assert scheduler.aborted == []
    scheduler.finish_hanging()
    assert (await again).output.finish_reason
    assert len(scheduler.submits) == 1


async def test_a_call_that_no_one_comes_back_to_is_aborted(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running.gateway._inference._recent, "_grace_s", 0.05)
    scheduler = running.scheduler
    scheduler.hangs_after = 1
    left = stub_of(running).Generate(request("left"))
    await eventually(lambda: len(scheduler.submits) == 1, "it is submitted")
    left.cancel()
    await eventually(lambda: len(scheduler.aborted) == 1, "it is aborted")


@pytest.mark.parametrize("prompt", ["Hello", "other"])
async def test_a_key_names_one_request_of_one_tenant(running: Running, prompt: str) -> None:
    stub = stub_of(running)
    await stub.Generate(request(f"tenants {prompt}", tenant="a"))
    await stub.Generate(request(f"tenants {prompt}", tenant="b"))
    assert len(running.scheduler.submits) == 2
    with pytest.raises(grpc.aio.AioRpcError, match="idempotency_key: is that of another") as error:
        await stub.Generate(request(f"tenants {prompt}", tenant="a", priority=1))
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    chat = pb.ChatRequest(messages=[pb.ChatMessage(role="user", content="Hello")])
    chat.options.idempotency_key = f"tenants {prompt}"
    chat.options.tenant = "b"
    with pytest.raises(grpc.aio.AioRpcError, match="is that of another request"):
        await stub.Chat(chat)


async def test_a_refused_call_may_be_sent_again_under_its_key_and_id(running: Running) -> None:
    stub, scheduler = stub_of(running), running.scheduler
    output, end = scheduler.output, scheduler.end
    scheduler.refuse(grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full")
    with pytest.raises(grpc.aio.AioRpcError, match="the queue is full"):
        await stub.Generate(request("refused"))
    scheduler.output, scheduler.end = output, end
    assert (await stub.Generate(request("refused"))).output.text == "Hello world"
    first, second = scheduler.submits
    assert first.request_id == second.request_id, "the queue keeps a place for this id"


@pytest.mark.parametrize(("key", "problem"), [("k" * 257, "257 bytes"), ("k", "is for calls")])
async def test_keys_that_cannot_be_are_refused_by_name(
    running: Running, key: str, problem: str
) -> None:
    stub = stub_of(running)
    whole = request(key)
    streamed = pb.GenerateStreamRequest(prompt=whole.prompt, options=whole.options)
    with pytest.raises(grpc.aio.AioRpcError, match=f"idempotency_key: {problem}"):
        async for _ in stub.GenerateStream(streamed):
            pass


class Counted:
    """A call that counts how often it runs, and waits if it is told to."""

    def __init__(self, size: int = 1) -> None:
        self.num_runs = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self._size = size

    async def __call__(self) -> Message:
        self.num_runs += 1
        await self.gate.wait()
        return pb.GenerateResponse(request_id="x" * self._size)


async def test_answers_are_forgotten_by_age_number_and_size() -> None:
    now = [0.0]
    recent = RecentCalls(lambda: now[0], max_per_tenant=3, max_bytes=10_000)
    call = Counted()
    for name in ("0", "1", "2", "3"):
        await recent.run(CallKey("a", name), b"", call)
    assert recent.num_kept == 3, "of one tenant"
    await recent.run(CallKey("a", "3"), b"", call)
    assert call.num_runs == 4
    await recent.run(CallKey("a", "0"), b"", call)
    assert call.num_runs == 5, "the oldest was forgotten"
    await recent.run(CallKey("b", "0"), b"", call)
    assert recent.num_kept == 4
    await recent.run(CallKey("c", "0"), b"", Counted(9_995))
    assert recent.num_kept == 1, "the newest alone fits"
    now[0] = KEPT_S
    await recent.run(CallKey("d", "0"), b"", call)
    assert recent.num_kept == 1


async def test_a_failure_is_not_kept_and_all_who_wait_get_it() -> None:
    recent, failures = RecentCalls(), [RequestError(ErrorKind.INTERNAL, "no")]

    async def fail() -> Message:
        await asyncio.sleep(0)
        if failures:
            raise failures.pop()
        return pb.GenerateResponse()

    both = await asyncio.gather(
        recent.run(KEY, b"", fail), recent.run(KEY, b"", fail), return_exceptions=True
    )
    assert [type(one) for one in both] == [RequestError] * 2
    assert await recent.run(KEY, b"", fail) == pb.GenerateResponse()


async def test_callers_who_leave_at_once_do_not_pile_up_work() -> None:
    recent, call = RecentCalls(), Counted()
    call.gate.clear()
    for number in range(MAX_LEFT + 10):
        waiting = asyncio.ensure_future(recent.run(CallKey("a", str(number)), b"", call))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    assert len(recent._running) == MAX_LEFT
    call.gate.set()
    async with asyncio.timeout(patience(5)):
        while recent._running:
            await asyncio.sleep(0)
    assert recent.num_kept == MAX_LEFT


async def test_a_caller_who_comes_back_as_a_call_is_given_up_gets_a_new_one() -> None:
    recent, call = RecentCalls(), Counted()
    call.gate.clear()
    waiting = asyncio.ensure_future(recent.run(KEY, b"", call))
    await asyncio.sleep(0.01)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    recent._give_up(KEY)
    call.gate.set()
    assert await recent.run(KEY, b"", call)
    assert call.num_runs == 2
