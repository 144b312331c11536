"""A loop takes the news of all finished gRPC operations at once, and misses none."""

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import uvloop

from wire.aio import loop
from wire.aio.loop import GrpcLoop
from wire.server import SERVER_OPTIONS

NUM_CALLS, NUM_MESSAGES = 64, 50


@pytest.mark.parametrize("num_bytes", [1, 2, 500])
def test_all_bytes_are_taken_and_the_operations_handled_once(num_bytes: int) -> None:
    reader, writer = socket.socketpair()
    with reader, writer:
        reader.setblocking(False)
        writer.send(b"1" * num_bytes)
        handled = []
        loop.handle_all(reader, lambda: handled.append(reader.recv(1)))
        assert handled == [b"1"]
        with pytest.raises(BlockingIOError):
            reader.recv(1)


def test_many_streams_at_once_end_with_all_their_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    num_rounds, handle_all = 0, loop.handle_all

    def counted(*args: Any) -> None:
        nonlocal num_rounds
        num_rounds += 1
        handle_all(*args)

    monkeypatch.setattr(loop, "handle_all", counted)
    uvloop.run(_stream_all(), loop_factory=GrpcLoop)
    assert num_rounds > 0, "grpc.aio names its reader in another way"


async def _stream_all() -> None:
    async def count(_: bytes, context: Any) -> AsyncIterator[bytes]:
        for number in range(NUM_MESSAGES):
            yield bytes([number])
            await asyncio.sleep(0)

    server = grpc.aio.server(options=SERVER_OPTIONS)
    handler = grpc.unary_stream_rpc_method_handler(count)  # type: ignore[arg-type]
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("Test", {"Count": handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:

        async def read() -> list[bytes]:
            return [message async for message in channel.unary_stream("/Test/Count")(b"")]

        read_all = await asyncio.gather(*(read() for _ in range(NUM_CALLS)))
    assert read_all == [[bytes([number]) for number in range(NUM_MESSAGES)]] * NUM_CALLS
    await server.stop(0)
