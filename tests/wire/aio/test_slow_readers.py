"""A stream that its client does not read ends, and what it held is free."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from tests.pace import paced, patience
from wire.aio.slow_readers import SlowReaders, WriteWatch
from wire.server import SERVER_OPTIONS

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


async def test_a_stream_that_has_nothing_to_say_for_long_is_not_a_slow_reader() -> None:
    async def quiet(_: Any, context: Any) -> AsyncIterator[bytes]:
        yield b"1"
        await asyncio.sleep(4 * paced(0.05))
        yield b"2"

    server = grpc.aio.server(options=SERVER_OPTIONS, interceptors=[SlowReaders(paced(0.05))])
    handler = grpc.unary_stream_rpc_method_handler(quiet)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("Test", {"Go": handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_stream("/Test/Go")(b"")
        assert [message async for message in call] == [b"1", b"2"]
    await server.stop(0)


async def test_a_cancellation_from_elsewhere_passes_a_write_watch() -> None:
    async def write_for_ever() -> None:
        with WriteWatch(patience(60)) as watch:
            watch.began_s = watch.loop.time()
            await asyncio.Event().wait()

    writing = asyncio.create_task(write_for_ever())
    await asyncio.sleep(0)
    writing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing
