"""Calls of gRPC servers by method and status, asyncio and threaded."""

from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.wire.metrics.test_book import parsed, series
from wire.aio.server import aio_server
from wire.aio.slow_readers import SlowReaders
from wire.metrics.book import Book
from wire.metrics.grpc_calls import AioCallCounter, CallCounter, CallCounts, declared_calls
from wire.server import bind

SERVICES = ("grpc.health.v1.Health",)
CHECK = ("unary", "grpc.health.v1.Health", "Check")
WATCH = ("server_stream", "grpc.health.v1.Health", "Watch")
REQUEST = health_pb2.HealthCheckRequest
SERVING = health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)


class Counted:
    """A book of calls and what is read of it."""

    def __init__(self) -> None:
        self.book = Book(declared_calls(SERVICES))
        self.row = self.book.new_row()
        self.counts = CallCounts(self.book, self.row, SERVICES)

    def read(self, name: str) -> dict[tuple[str, ...], float]:
        samples = parsed(self.book.read([*self.row]))
        return {labels: value for (sample, labels), value in samples.items() if sample == name}


class AioHealth(health_pb2_grpc.HealthServicer):
    """Answers by the name that is asked about."""

    async def Check(self, request: Any, context: Any) -> Any:
        if request.service == "unknown":
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service")
        if request.service == "bug":
            raise ValueError("a bug")
        return SERVING

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[Any]:
        for _ in range(3):
            yield SERVING


class ThreadedHealth(health_pb2_grpc.HealthServicer):
    """The same, threaded."""

    def Check(self, request: Any, context: Any) -> Any:
        if request.service == "unknown":
            context.abort(grpc.StatusCode.NOT_FOUND, "no such service")
        return SERVING

    def Watch(self, request: Any, context: Any) -> Iterator[Any]:
        for _ in range(3):
            yield SERVING


async def test_an_asyncio_server_counts_each_call_once_by_its_status() -> None:
    counted = Counted()
    server = aio_server((), [AioCallCounter(counted.counts), SlowReaders(60.0)])
    health_pb2_grpc.add_HealthServicer_to_server(AioHealth(), server)
    port = bind(server, "127.0.0.1:0", "test")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        await stub.Check(REQUEST())
        for name in ("unknown", "unknown", "bug"):
            with pytest.raises(grpc.aio.AioRpcError):
                await stub.Check(REQUEST(service=name))
        assert len([answer async for answer in stub.Watch(REQUEST())]) == 3
    await server.stop(None)
    assert counted.read("grpc_server_started_total") == {series(*CHECK): 4, series(*WATCH): 1}
    assert counted.read("grpc_server_handled_total") == {
        series(*CHECK, "OK"): 1,
        series(*CHECK, "NOT_FOUND"): 2,
        series(*CHECK, "UNKNOWN"): 1,
        series(*WATCH, "OK"): 1,
    }
    assert counted.read("grpc_server_handling_seconds_count") == {
        series(*CHECK): 4,
        series(*WATCH): 1,
    }


def test_a_threaded_server_does_the_same() -> None:
    counted = Counted()
    server = grpc.server(ThreadPoolExecutor(2), interceptors=[CallCounter(counted.counts)])
    health_pb2_grpc.add_HealthServicer_to_server(ThreadedHealth(), server)
    port = bind(server, "127.0.0.1:0", "test")
    server.start()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        stub.Check(REQUEST())
        with pytest.raises(grpc.RpcError):
            stub.Check(REQUEST(service="unknown"))
        assert len(list(stub.Watch(REQUEST()))) == 3
    server.stop(None).wait()
    assert counted.read("grpc_server_handled_total") == {
        series(*CHECK, "OK"): 1,
        series(*CHECK, "NOT_FOUND"): 1,
        series(*WATCH, "OK"): 1,
    }


async def test_a_stream_that_would_be_counted_per_message_is_a_mistake() -> None:
    counter = AioCallCounter(Counted().counts)

    async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
        yield SERVING

    async def handler(_: Any) -> Any:
        return grpc.unary_stream_rpc_method_handler(stream)  # type: ignore[arg-type]

    details: Any = type("Details", (), {"method": "/grpc.health.v1.Health/Watch"})
    with pytest.raises(TypeError, match="SlowReaders must come after"):
        await counter.intercept_service(handler, details)
