"""A stream that its client does not read ends, and what it held is free."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from tests.pace import paced, patience
from wire.server import SERVER_OPTIONS
from wire.slow_readers import SlowReaders

pytestmark = pytest.mark.asyncio


@pytest.mark.parametrize("kind", ["unary_stream", "stream_stream"])
async def test_a_client_that_does_not_read_is_left_and_one_that_does_is_not(kind: str) -> None:
    num_sent, ended = 0, asyncio.Event()

    async def endless(_: Any, context: Any) -> AsyncIterator[bytes]:
        nonlocal num_sent
        try:
            while True:
                num_sent += 1
                yield bytes(60_000)
        finally:
            ended.set()

    server = grpc.aio.server(options=SERVER_OPTIONS, interceptors=[SlowReaders(paced(0.5))])
    handler = getattr(grpc, f"{kind}_rpc_method_handler")(endless)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("Test", {"Go": handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = getattr(channel, kind)("/Test/Go")(*([b""] if kind == "unary_stream" else []))
        until_s = time.monotonic() + paced(1.5)
        while time.monotonic() < until_s:
            assert len(await call.read()) == 60_000
        assert not ended.is_set()
        num_read = num_sent
        async with asyncio.timeout(patience(10)):
            await ended.wait()
        assert (num_sent - num_read) * 60_000 < 64 << 20  # gRPC's windows, and no more
    await server.stop(0)
