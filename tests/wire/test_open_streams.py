"""Streams that need no key are few and end; other calls find their places all the same."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from tests.pace import patience
from wire import open_streams
from wire.aio.server import aio_server
from wire.open_streams import AioOpenStreams, ThreadedOpenStreams
from wire.server import add_reflection

MOST, NUM_TRIED, NUM_THREADS = 3, 40, 6
REFLECT = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
LIST = reflection_pb2.ServerReflectionRequest(list_services="")


@contextmanager
def threaded() -> Iterator[int]:
    threads = ThreadPoolExecutor(NUM_THREADS)
    server = grpc.server(threads, interceptors=[ThreadedOpenStreams(MOST)])
    health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server)
    add_reflection(server, [health.SERVICE_NAME], aio=False)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield port
    server.stop(0)


def reflecting(channel: grpc.Channel, requests: Iterator[Any]) -> Any:
    return channel.stream_stream(
        REFLECT,
        reflection_pb2.ServerReflectionRequest.SerializeToString,
        reflection_pb2.ServerReflectionResponse.FromString,
    )(requests)


def watching(channel: grpc.Channel) -> Any:
    return health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())


class Silent:
    """Requests of a stream: one, and no more until it is told to end."""

    def __init__(self) -> None:
        self.over = threading.Event()

    def __iter__(self) -> Iterator[Any]:
        yield LIST
        self.over.wait()


def test_however_many_are_opened_few_stay_and_other_calls_are_served() -> None:
    silent = Silent()
    with threaded() as port, grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        calls = [
            reflecting(channel, iter(silent)) if number % 2 else watching(channel)
            for number in range(NUM_TRIED)
        ]
        served, refused = [], []
        for call in calls:
            try:
                next(call)
                served.append(call)
            except grpc.RpcError as error:
                refused.append(error)
        assert len(served) == MOST
        assert {error.code() for error in refused} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert f"{MOST} streams of methods that need no key are open" in refused[0].details()
        check = health_pb2_grpc.HealthStub(channel).Check
        for _ in range(NUM_THREADS):
            check(health_pb2.HealthCheckRequest(), timeout=patience(5))
        for call in served:
            call.cancel()  # their places are free at once
        ends_s = time.monotonic() + patience(10)
        while True:
            try:
                next(watching(channel))
                break
            except grpc.RpcError:
                assert time.monotonic() < ends_s
        silent.over.set()


@pytest.mark.parametrize("opens", [lambda c: watching(c), lambda c: reflecting(c, iter(Silent()))])
def test_a_stream_ends_after_its_time_and_says_so(
    opens: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_streams, "WATCH_S", 0.2)
    monkeypatch.setattr(open_streams, "REFLECTION_S", 0.2)
    with threaded() as port, grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        for _ in range(2 * MOST):
            call = opens(channel)
            with pytest.raises(grpc.RpcError) as caught:
                for _ in call:
                    pass
            error: Any = caught.value
            assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert "ends after" in error.details()


async def test_the_same_holds_on_an_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_streams, "WATCH_S", 1.0)
    server = aio_server(interceptors=[AioOpenStreams(MOST)])
    health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
    add_reflection(server, [health.SERVICE_NAME], aio=True)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        calls: list[Any] = [stub.Watch(health_pb2.HealthCheckRequest()) for _ in range(MOST)]
        for call in calls:
            await call.read()
        reflect: Any = channel.stream_stream(
            REFLECT,
            reflection_pb2.ServerReflectionRequest.SerializeToString,
            reflection_pb2.ServerReflectionResponse.FromString,
        )
        refused = reflect()
        assert await refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await stub.Check(health_pb2.HealthCheckRequest())
        for call in calls:
            assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        answered = reflect()
        await answered.write(LIST)
        assert (await answered.read()).HasField("list_services_response")
        answered.cancel()
    await server.stop(0)
