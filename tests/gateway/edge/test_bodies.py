"""Bodies are bounded while they are received: their values, and the memory of all of them."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import grpc
import pytest

from gateway.callers.body_budget import BodyBudget
from gateway.callers.text_turns import MIB
from gateway.edge.edge_limits import EdgeLimits
from gateway.errors.request_errors import RequestError
from pagewire.v1 import inference_pb2, inference_pb2_grpc
from tests.gateway.http_calls import connected, error_of
from tests.pace import paced

pytestmark = pytest.mark.asyncio(loop_scope="module")

HEAD = b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
PATH = b"/v1/completions"
SMALL = EdgeLimits(max_body_mib=1, max_bodies_mib=6, max_bodies_mib_per_client=4)
ELEMENTS = {
    "ids": b"1,",
    "lists": b"[],",
    "objects": b'{"a":1},',
    "texts": b'"a",',
    "wrong in each way": b'[{"a":null}],',
}
PLACES = {
    "/v1/completions": (b'{"prompt":[', b'{"prompt":"x","stop":['),
    "/v1/chat/completions": (b'{"messages":[', b'{"messages":[{"role":"user","content":['),
    "/v1/responses": (b'{"input":[',),
    "/v1/messages": (b'{"max_tokens":1,"messages":[',),
    "/v1/embeddings": (b'{"input":[',),
    "/tokenize": (b'{"prompt":"x","unknown":[',),
}


async def read(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], Any]:
    """Status, headers and body of the next answer."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    status, *lines = head.strip().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    body = await reader.readexactly(int(headers["content-length"]))
    return int(status.split()[1]), headers, json.loads(body)


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("path", PLACES)
async def test_too_many_values_are_refused_while_they_come(
    path: str, element: str, running: Any
) -> None:
    part = ELEMENTS[element] * 8192
    for place in PLACES[path]:
        num_sent = 0
        async with connected(running) as (reader, writer):
            writer.write(HEAD % path.encode() + b"content-length: 30000000\r\n\r\n" + place)
            answer = asyncio.create_task(read(reader))
            while not answer.done():
                writer.write(part)
                await writer.drain()
                num_sent += len(part)
                assert num_sent < 20_000_000, "nothing was refused"
                await asyncio.sleep(0)
            status, _, body = await answer
        assert status == 413 and "--max-body-values" in json.dumps(body), body


async def test_what_stands_in_texts_is_no_value(running: Any) -> None:
    prompt = '[{"a": "b\\", :' * 100_000
    response = await running.http.post("/v1/completions", json={"prompt": prompt})
    assert error_of(response, 400)["code"] == "context_length_exceeded"


async def test_a_long_context_may_be_sent_as_ids(start: Any) -> None:
    running = await start(edge=EdgeLimits(max_body_values=100))
    ids = [5] * running.scheduler.model.max_model_len
    response = await running.http.post("/v1/completions", json={"prompt": ids[1:]})
    assert response.status_code == 200, response.text
    response = await running.http.post("/v1/completions", json={"prompt": ids * 2})
    assert "--max-body-values" in error_of(response, 413)["message"]


async def test_a_large_body_is_read_as_a_small_one(running: Any) -> None:
    for fill in ("a", "é", "😀", '\\"\n'):
        body = {"model": fill * 600_000, "prompt": "Hello"}
        error = error_of(await running.http.post("/v1/completions", json=body), 404)
        assert error["param"] == "model"
    for broken in (b'{"prompt": "' + b"x" * 600_000, b" " * 600_000 + b"\xff{}"):
        headers = {"content-type": "application/json"}
        response = await running.http.post("/v1/completions", content=broken, headers=headers)
        assert error_of(response, 400)


async def begin(writer: Any, num_bytes: int, *, total: int = MIB, path: bytes = PATH) -> None:
    """Sends the first bytes of a body, which is a text without an end."""
    writer.write(HEAD % path + b"content-length: %d\r\n\r\n" % total)
    writer.write(b'{"prompt":"' + b"x" * (num_bytes - 11))
    await writer.drain()


async def test_unfinished_bodies_of_a_client_take_no_more_than_its_share(
    start: Any, eventually: Any
) -> None:
    running = await start(edge=SMALL)
    bodies = running.gateway.bodies
    async with AsyncExitStack() as stack:
        opened = [await stack.enter_async_context(connected(running)) for _ in range(5)]
        for index, (_, writer) in enumerate(opened[:4]):
            await begin(writer, MIB - 100)
            await eventually(
                lambda n=index + 1: bodies.num_bytes == n * (MIB - 100), "the body is counted"
            )
        reader, writer = opened[4]
        await begin(writer, MIB - 100)
        status, headers, body = await read(reader)
        assert status == 429 and headers["retry-after"] == "1"
        assert "--max-bodies-mib-per-client" in body["error"]["message"]
        assert bodies.num_bytes <= 4 * MIB
        small = await running.http.post("/v1/completions", json={"prompt": "Hello"})
        assert small.status_code == 200
        for reader, writer in opened[:4]:
            writer.write(b"x" * 98 + b'"}')
            assert (await read(reader))[0] == 400  # too long for the model
        assert bodies.num_bytes == 0


async def test_all_clients_together_take_no_more_than_the_whole() -> None:
    budget = BodyBudget(6 * MIB, 4 * MIB)
    with budget.share_of("a") as one, budget.share_of("b") as other, budget.share_of("c") as third:
        one.hold(4 * MIB)
        other.hold(MIB)
        with pytest.raises(RequestError, match="--max-bodies-mib-per-client"):
            one.hold(4 * MIB + 1)
        with pytest.raises(RequestError, match=r"--max-bodies-mib\)"):
            third.hold(2 * MIB)
        third.hold(MIB // 4, 4)  # as much as a wide character makes of it
        assert budget.num_bytes == 6 * MIB
        third.became_tokens(MIB // 4)
        assert budget.num_bytes == 5 * MIB
        third.became_tokens(MIB)
        third.hold(MIB // 2)
    assert budget.num_bytes == 0


async def test_a_share_ends_with_its_request_however_that_ends(start: Any, eventually: Any) -> None:
    running = await start(edge=EdgeLimits(max_body_mib=1, body_timeout_s=paced(0.3)))
    bodies, http = running.gateway.bodies, running.http

    async def nothing_is_held(what: str) -> None:
        await eventually(lambda: bodies.num_bytes == 0, f"nothing is held after {what}")

    async def in_parts() -> AsyncIterator[bytes]:
        yield b'{"prompt": "Hel'
        yield b'lo", "max_tokens": 1}'

    hello = {"prompt": "Hello"}
    assert (await http.post("/v1/completions", json=hello)).status_code == 200
    await nothing_is_held("an answer")
    assert (await http.post("/v1/completions", json=hello | {"stream": True})).status_code == 200
    await nothing_is_held("a stream")
    headers = {"content-type": "application/json"}
    chunked = await http.post("/v1/completions", content=in_parts(), headers=headers)
    assert chunked.status_code == 200
    await nothing_is_held("a chunked body")
    for refused in (b"{", b'{"prompt": 1}', b"[" * 300_000, b" " * (MIB + 1)):
        response = await http.post("/v1/completions", content=refused, headers=headers)
        assert response.status_code in (400, 413)
        await nothing_is_held("a refusal")
    async with connected(running) as (reader, writer):
        await begin(writer, 100_000)
        await eventually(lambda: bodies.num_bytes > 0, "the body is counted")
    await nothing_is_held("a client that left")
    async with connected(running) as (reader, writer):
        await begin(writer, 100_000)
        assert (await reader.read()).startswith(b"HTTP/1.1 408 ")
        await nothing_is_held("a body that did not come in time")


async def test_a_request_that_waits_holds_no_more_than_what_is_no_text(
    start: Any, eventually: Any
) -> None:
    running = await start()
    running.scheduler.hangs_after = 0
    bodies = running.gateway.bodies
    prompt = "Hello " * 40
    waiting = asyncio.create_task(running.http.post("/v1/completions", json={"prompt": prompt}))
    await eventually(lambda: bool(running.scheduler.submits), "the request is submitted")
    assert bodies.num_bytes < 50
    running.scheduler.finish_hanging()
    assert (await waiting).status_code == 200
    assert bodies.num_bytes == 0


async def test_messages_of_calls_count_with_the_bodies(start: Any, eventually: Any) -> None:
    running = await start(edge=SMALL)
    stub = inference_pb2_grpc.InferenceServiceStub(running.channel)
    request = inference_pb2.GenerateRequest(prompt=inference_pb2.Prompt(text="x" * (MIB // 2)))
    async with AsyncExitStack() as stack:
        for _ in range(4):
            _, writer = await stack.enter_async_context(connected(running))
            await begin(writer, MIB - 100)
        bodies = running.gateway.bodies
        await eventually(lambda: bodies.num_bytes > 3 * MIB, "the bodies are counted")
        with pytest.raises(grpc.aio.AioRpcError) as told:
            await stub.Generate(request)
        assert told.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "--max-bodies-mib-per-client" in (told.value.details() or "")
    await eventually(lambda: bodies.num_bytes == 0, "nothing is held")


@pytest.mark.parametrize("field", [b"\x0a\0", b"\x1a\2\x0a\0", b"\x12\3\x12\1x"])
async def test_a_million_parts_of_a_message_are_refused_before_they_are_made(
    field: bytes, running: Any
) -> None:
    """Turns, tools and stop strings: two bytes or so each, and some hundred once parsed."""
    chat = running.channel.unary_unary("/pagewire.v1.InferenceService/Chat")
    with pytest.raises(grpc.aio.AioRpcError) as told:
        await chat(field * 1_000_000)
    assert told.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "more than 65536 fields" in (told.value.details() or "")


async def test_one_body_always_fits() -> None:
    limits = EdgeLimits(max_body_mib=1000)
    assert limits.max_bodies_bytes >= limits.max_bodies_bytes_per_client >= 4000 * MIB
    assert EdgeLimits().max_bodies_bytes == 512 * MIB
