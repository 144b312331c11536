"""A scheduler that takes its time to shake hands, as on a busy machine, is reached all the same."""

import asyncio
import contextlib

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from gateway.process.server import LINK_OPTIONS
from tests.pace import patience

HANDSHAKE_S = 3.0  # longer than the longest pause between two attempts
CHUNK = 1 << 16


async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await source.read(CHUNK):
            target.write(data)
            await target.drain()
    target.close()
    with contextlib.suppress(OSError):
        await target.wait_closed()


async def test_a_gateway_waits_for_a_slow_handshake() -> None:
    server = grpc.aio.server()
    service = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()

    relaying: set[asyncio.Task[None] | None] = set()

    async def relayed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        relaying.add(asyncio.current_task())
        await asyncio.sleep(HANDSHAKE_S)
        there, back = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(copy(reader, back), copy(there, writer))

    relay = await asyncio.start_server(relayed, "127.0.0.1", 0)
    address = f"127.0.0.1:{relay.sockets[0].getsockname()[1]}"
    async with grpc.aio.insecure_channel(address, options=LINK_OPTIONS) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(
            health_pb2.HealthCheckRequest(), wait_for_ready=True, timeout=patience(10)
        )
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    await server.stop(None)
    # What is still open when the loop ends would be the next test's warning.
    async with asyncio.timeout(patience(10)):
        await asyncio.gather(*(task for task in relaying if task is not None))
    relay.close()
    await relay.wait_closed()
