"""Limits of one client: open requests over HTTP and gRPC, encodings, sizes of messages."""

import asyncio
import gzip
import json
from contextlib import ExitStack
from typing import Any

import grpc
import pytest

from gateway.edge.clients import OpenRequests
from gateway.edge.edge_limits import EdgeLimits
from gateway.errors.request_errors import RequestError
from pagewire.v1 import inference_pb2, inference_pb2_grpc
from tests.gateway.http_calls import error_of
from wire.identity.access import CALLER
from wire.identity.keys import Caller

pytestmark = pytest.mark.asyncio(loop_scope="module")
STREAM = {"prompt": "Hello", "stream": True}


async def test_a_client_with_too_many_open_requests_is_told_when_to_come_back(
    start: Any, eventually: Any
) -> None:
    running = await start(edge=EdgeLimits(max_streams_per_client=1))
    running.scheduler.hangs_after = 1
    prompt = inference_pb2.Prompt(text="Hello")
    stub = inference_pb2_grpc.InferenceServiceStub(running.channel)
    async with running.http.stream("POST", "/v1/completions", json=STREAM) as response:
        assert response.status_code == 200
        refused = await running.http.post("/v1/completions", json=STREAM)
        error = error_of(refused, 429)
        assert "--max-streams-per-client" in error["message"]
        assert refused.headers["retry-after"] == "1"
        assert (await running.http.get("/health")).status_code == 200
        with pytest.raises(grpc.aio.AioRpcError) as told:
            await stub.Generate(inference_pb2.GenerateRequest(prompt=prompt))
        assert told.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        with pytest.raises(grpc.aio.AioRpcError) as told:
            async for _ in stub.GenerateStream(inference_pb2.GenerateStreamRequest(prompt=prompt)):
                pass
        assert "--max-streams-per-client" in (told.value.details() or "")
        running.scheduler.finish_hanging()
        await response.aread()
    running.scheduler.hangs_after = None
    assert (await running.http.post("/v1/completions", json=STREAM)).status_code == 200


async def test_clients_are_counted_by_key_where_keys_are_needed_else_by_address() -> None:
    opened = OpenRequests(1)
    one, another = "10.0.0.1", "10.0.0.2"
    with opened.one_of(one), opened.one_of(another), pytest.raises(RequestError):
        opened.one_of(one).__enter__()
    with ExitStack() as stack:
        for name in ("a", "b"):
            CALLER.set(Caller(name, None, frozenset()))
            stack.enter_context(opened.one_of("10.0.0.1"))
        with pytest.raises(RequestError), opened.one_of("10.0.0.2"):
            pass


async def test_a_compressed_body_is_a_415(running: Any) -> None:
    body = gzip.compress(json.dumps({"prompt": "Hello"}).encode())
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    response = await running.http.post("/v1/completions", content=body, headers=headers)
    assert error_of(response, 415)["param"] == "content-encoding"


async def test_a_message_is_bounded_after_decompression(start: Any) -> None:
    running = await start(edge=EdgeLimits(max_body_mib=1))
    prompt = inference_pb2.Prompt(text="x" * (2 << 20))
    stub = inference_pb2_grpc.InferenceServiceStub(running.channel)
    for compression in (grpc.Compression.NoCompression, grpc.Compression.Gzip):
        with pytest.raises(grpc.aio.AioRpcError) as told:
            await stub.Generate(
                inference_pb2.GenerateRequest(prompt=prompt), compression=compression
            )
        assert told.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "larger than max" in (told.value.details() or "")


async def test_the_body_limit_is_an_option(start: Any) -> None:
    running = await start(edge=EdgeLimits(max_body_mib=1))
    response = await running.http.post("/v1/completions", content=b" " * ((1 << 20) + 1))
    assert "--max-body-mib" in error_of(response, 413)["message"]


async def test_each_refused_body_of_a_connection_may_be_as_large(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.edge.http_connection.MAX_DROPPED_BYTES", 5 << 20)
    running = await start(edge=EdgeLimits(max_body_mib=1))
    for _ in range(4):  # the client keeps its connection
        response = await running.http.post("/v1/completions", content=b" " * (4 << 20))
        assert error_of(response, 413)


async def test_an_old_connection_is_left_after_its_stream_has_ended(
    start: Any, eventually: Any
) -> None:
    running = await start(edge=EdgeLimits(max_connection_age_s=0.2))
    running.scheduler.hangs_after = 1
    stub = inference_pb2_grpc.InferenceServiceStub(running.channel)
    request = inference_pb2.GenerateStreamRequest(prompt=inference_pb2.Prompt(text="Hello"))
    call = stub.GenerateStream(request)
    first = await call.read()
    assert isinstance(first, inference_pb2.GenerateStreamResponse)
    await asyncio.sleep(1)  # several times as long as the connection may live
    running.scheduler.finish_hanging()
    last = await call.read()
    assert isinstance(last, inference_pb2.GenerateStreamResponse) and last.delta.finish_reason
    assert await call.code() is grpc.StatusCode.OK
