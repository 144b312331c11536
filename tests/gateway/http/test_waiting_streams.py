"""A stream that waits says so: proxies end one in which no byte comes for a minute."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import httpx
import pytest
import pytest_asyncio

from gateway.callers.text_turns import NUM_SHORT_THREADS
from gateway.edge.edge_limits import EdgeLimits
from gateway.http.anthropic.routes import PING
from gateway.http.event_stream import COMMENT
from pagewire.v1 import inference_pb2, inference_pb2_grpc
from tests.gateway.conftest import Running
from tests.gateway.http_calls import error_of
from tests.gateway.tokens.test_turns import Gate, as_client
from tests.pace import paced, patience

pytestmark = pytest.mark.asyncio(loop_scope="module")

INTERVAL_S = 0.05
CHAT = {"messages": [{"role": "user", "content": "Hello"}]}
ROUTES: list[tuple[str, dict[str, Any], bytes]] = [
    ("/v1/chat/completions", CHAT, COMMENT),
    ("/v1/completions", {"prompt": "Hello"}, COMMENT),
    ("/v1/completions", {"prompt": ["Hello", "world"], "n": 2}, COMMENT),
    ("/v1/responses", {"input": "Hello"}, COMMENT),
    ("/v1/messages", CHAT | {"model": "tiny", "max_tokens": 9}, PING),
]
IDS = ["chat", "completion", "several", "response", "message"]


@pytest_asyncio.fixture(loop_scope="module")
async def waiting(start: Callable[..., Any]) -> Running:
    """A gateway with a short interval, and a scheduler that computes nothing until it is told."""
    running: Running = await start(edge=EdgeLimits(sse_keep_alive_interval=INTERVAL_S))
    running.scheduler.hangs_after = 0
    return running


@asynccontextmanager
async def streaming(
    running: Running, path: str, body: dict[str, Any]
) -> AsyncIterator[tuple[httpx.Response, AsyncIterator[bytes]]]:
    body = body | {"stream": True}
    async with running.http.stream("POST", path, json=body) as response:
        yield response, response.aiter_raw()


async def until(chunks: AsyncIterator[bytes], wanted: bytes, count: int = 1) -> bytes:
    """The text that is received until it holds `wanted` so many times."""
    received = b""
    async with asyncio.timeout(patience(10)):
        while received.count(wanted) < count:
            received += await anext(chunks)
    return received


async def rest(chunks: AsyncIterator[bytes]) -> bytes:
    async with asyncio.timeout(patience(10)):
        return b"".join([chunk async for chunk in chunks])


@pytest.mark.parametrize(("path", "body", "ping"), ROUTES, ids=IDS)
async def test_an_admitted_stream_pings_before_its_first_event_and_then_comes_whole(
    path: str, body: dict[str, Any], ping: bytes, waiting: Running
) -> None:
    async with streaming(waiting, path, body) as (response, chunks):
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        assert (await until(chunks, ping, 3)).replace(ping, b"") == b""
        for index in range(len(waiting.scheduler.submits)):
            waiting.scheduler.finish_hanging(index)
        received = (await rest(chunks)).replace(ping, b"")
    assert received.startswith((b"data: ", b"event: "))
    assert b"error" not in received.replace(b'"error":null', b"")


@pytest.mark.parametrize(("path", "body", "ping"), ROUTES, ids=IDS)
async def test_a_stream_pings_between_tokens(
    path: str, body: dict[str, Any], ping: bytes, waiting: Running
) -> None:
    waiting.scheduler.hangs_after = 1
    async with streaming(waiting, path, body) as (_, chunks):
        received = await until(chunks, b'{"')
        received += await until(chunks, ping, 2)
        for part in received.replace(ping, b"").split(b"\n\n")[:-1]:
            assert part.startswith((b"data: ", b"event: ")), part


async def test_a_ping_does_not_cut_an_event_in_two_or_follow_the_end(waiting: Running) -> None:
    waiting.scheduler.hangs_after = None
    async with streaming(waiting, "/v1/chat/completions", CHAT) as (_, chunks):
        received = await rest(chunks)
    assert received.replace(COMMENT, b"").endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize(("path", "body", "ping"), ROUTES, ids=IDS)
async def test_a_failure_after_the_head_is_an_event(
    path: str, body: dict[str, Any], ping: bytes, waiting: Running
) -> None:
    async with streaming(waiting, path, body) as (response, chunks):
        await until(chunks, ping)
        waiting.scheduler.refuse(grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full")
        waiting.scheduler.finish_hanging(0)
        received = (await rest(chunks)).replace(ping, b"")
    assert response.status_code == 200
    assert b"the queue is full" in received and b'"error"' in received
    assert received.count(b"[DONE]") == (ping == COMMENT and "responses" not in path)


async def test_a_refusal_before_the_interval_keeps_its_status(start: Callable[..., Any]) -> None:
    running = await start()  # 15 s
    running.scheduler.refuse(grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full")
    for path, body, _ in ROUTES:
        response = await running.http.post(path, json=body | {"stream": True})
        assert response.status_code == 429, path
        assert response.headers["retry-after"]


async def test_what_is_not_yet_checked_keeps_its_status_however_long_it_takes(
    waiting: Running,
) -> None:
    turns = waiting.gateway._pipeline._tokenizer._turns
    gates = [Gate() for _ in range(NUM_SHORT_THREADS)]
    tasks = [asyncio.create_task(as_client("b", turns, 1, gate.work)) for gate in gates]
    body = {"prompt": "1" * 8000, "stream": True}  # too long, which only its tokens tell
    call = asyncio.create_task(waiting.http.post("/v1/completions", json=body))
    await asyncio.sleep(paced(5 * INTERVAL_S))
    assert not call.done()
    for gate in gates:
        gate.opened.set()
    await asyncio.gather(*tasks)
    error_of(await call, 400)


async def test_a_client_that_leaves_before_the_first_event_aborts_its_request(
    waiting: Running, eventually: Callable[..., Any]
) -> None:
    async with streaming(waiting, "/v1/chat/completions", CHAT) as (_, chunks):
        await until(chunks, COMMENT)
    aborted = waiting.scheduler.aborted
    await eventually(lambda: len(aborted) == 1, "the request is aborted")
    assert waiting.gateway._pipeline.num_open == 0


async def test_pings_go_on_while_a_scheduler_is_replaced(
    waiting: Running, eventually: Callable[..., Any]
) -> None:
    scheduler = waiting.scheduler
    async with streaming(waiting, "/v1/completions", {"prompt": "Hello"}) as (_, chunks):
        await until(chunks, COMMENT)
        scheduler.outboxes[-1].put_nowait(None)
        await until(chunks, COMMENT, 2)
        await eventually(lambda: len(scheduler.submits) == 2, "the next one has the request")
        scheduler.finish_hanging()
        assert (await rest(chunks)).endswith(b"data: [DONE]\n\n")


async def test_no_interval_means_no_pings(start: Callable[..., Any]) -> None:
    running = await start(edge=EdgeLimits(sse_keep_alive_interval=0))
    running.scheduler.hangs_after = 1
    async with streaming(running, "/v1/completions", {"prompt": "Hello"}) as (_, chunks):
        received = await until(chunks, b"data: ")
        await asyncio.sleep(paced(5 * INTERVAL_S))
        running.scheduler.finish_hanging()
        assert COMMENT not in received + await rest(chunks)


@pytest.mark.parametrize("is_chat", [False, True])
async def test_a_grpc_stream_begins_before_its_first_message(
    is_chat: bool, waiting: Running
) -> None:
    stub = inference_pb2_grpc.InferenceServiceStub(waiting.channel)
    prompt = inference_pb2.Prompt(text="Hello")
    turn = inference_pb2.ChatMessage(role="user", content="Hello")
    if is_chat:
        call = stub.ChatStream(inference_pb2.ChatStreamRequest(messages=[turn]))
    else:
        call = stub.GenerateStream(inference_pb2.GenerateStreamRequest(prompt=prompt))
    async with asyncio.timeout(patience(10)):
        await call.initial_metadata()
    waiting.scheduler.finish_hanging()
    received = [answer async for answer in call]
    assert received[-1].delta.finish_reason
