"""A gateway that is asked to stop: what it refuses, what it finishes, and how the rest ends."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from pagewire.v1 import inference_pb2 as pb
from pagewire.v1 import inference_pb2_grpc
from tests.pace import paced, patience

pytestmark = pytest.mark.asyncio(loop_scope="module")
BODY = {"prompt": "Hello", "stream": True}
REQUEST = pb.GenerateStreamRequest(prompt=pb.Prompt(text="Hello"))


async def test_a_draining_gateway_refuses_with_503_and_a_time_and_says_it_is_not_ready(
    start: Callable[..., Any],
) -> None:
    running = await start(drain_timeout_s=patience(20))
    running.scheduler.hangs_after = 1
    async with running.http.stream("POST", "/v1/completions", json=BODY) as live:
        lines = live.aiter_lines()
        assert (await anext(lines)).startswith("data: ")
        ending = asyncio.create_task(running.gateway.stop())
        await asyncio.sleep(0.2)
        for stream in (False, True):
            refused = await running.http.post("/v1/completions", json=BODY | {"stream": stream})
            assert refused.status_code == 503
            assert refused.headers["retry-after"] == "1"
            assert "shutting down" in refused.json()["error"]["message"]
        assert (await running.http.get("/ready")).status_code == 503
        assert (await running.http.get("/health")).status_code == 200
        running.scheduler.finish_hanging()
        assert [line async for line in lines if line][-1] == "data: [DONE]"
    await ending


@pytest.mark.parametrize("is_hurried", [False, True])
async def test_what_is_left_ends_with_an_error_event_and_done(
    is_hurried: bool, start: Callable[..., Any]
) -> None:
    running = await start(drain_timeout_s=patience(60) if is_hurried else paced(0.3))
    running.scheduler.hangs_after = 1
    hurry = asyncio.Event()
    async with running.http.stream("POST", "/v1/completions", json=BODY) as live:
        lines = live.aiter_lines()
        assert (await anext(lines)).startswith("data: ")
        ending = asyncio.create_task(running.gateway.stop(hurry))
        if is_hurried:
            await asyncio.sleep(0.2)
            hurry.set()
        async with asyncio.timeout(patience(10)):
            *_, error, done = [line.removeprefix("data: ") async for line in lines if line]
    assert done == "[DONE]"
    assert json.loads(error)["error"]["code"] == "unavailable"
    assert "shut down" in json.loads(error)["error"]["message"]
    async with asyncio.timeout(patience(10)):
        await ending


async def test_what_is_left_over_grpc_ends_unavailable_with_a_message(
    start: Callable[..., Any],
) -> None:
    running = await start(drain_timeout_s=paced(0.3))
    running.scheduler.hangs_after = 1
    stub = inference_pb2_grpc.InferenceServiceStub(running.channel)
    call = stub.GenerateStream(REQUEST)
    assert (await call.read()).delta.text
    ending = asyncio.create_task(running.gateway.stop())
    async with asyncio.timeout(patience(10)):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            while await call.read():
                pass
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "shut down" in error.value.details()
    await ending
