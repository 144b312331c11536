"""Binding, reflection and options of a server, from a client's view."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_reflection.v1alpha import reflection_pb2

from pagewire.v1 import worker_pb2
from tests.pace import patience
from wire.server import CHANNEL_OPTIONS, SERVER_OPTIONS, PortInUse, add_reflection, bind

TIMEOUT_S = patience(10)


def echo(request: bytes, context: grpc.ServicerContext) -> bytes:
    return request


@pytest.fixture
def port() -> Iterator[int]:
    """A server with reflection for WorkerService and a method that echoes bytes."""
    server = grpc.server(ThreadPoolExecutor(4), options=SERVER_OPTIONS)
    add_reflection(server, ["pagewire.v1.WorkerService"], aio=False)
    handlers = {"Echo": grpc.unary_unary_rpc_method_handler(echo)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("Test", handlers),))
    port = bind(server, "127.0.0.1:0", "the test")
    server.start()
    yield port
    server.stop(None).wait()


@pytest.fixture
def channel(port: int) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(f"127.0.0.1:{port}", options=CHANNEL_OPTIONS) as channel:
        yield channel


def reflect(
    channel: grpc.Channel, version: str, **question: str
) -> reflection_pb2.ServerReflectionResponse:
    call = channel.stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )
    requests = iter([reflection_pb2.ServerReflectionRequest(**question)])
    return next(call(requests, timeout=TIMEOUT_S))


def test_a_port_in_use_is_an_error_that_names_it(port: int) -> None:
    second = grpc.server(ThreadPoolExecutor(1), options=SERVER_OPTIONS)
    with pytest.raises(PortInUse, match=f"the second cannot listen on 127.0.0.1:{port}"):
        bind(second, f"127.0.0.1:{port}", "the second")


def test_an_address_that_is_none_is_an_error_that_names_it() -> None:
    server = grpc.server(ThreadPoolExecutor(1), options=SERVER_OPTIONS)
    with pytest.raises(PortInUse, match=r"192\.0\.2\.1:5"):
        bind(server, "192.0.2.1:5", "the test")


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
def test_reflection_lists_the_services_named(channel: grpc.Channel, version: str) -> None:
    response = reflect(channel, version, list_services="")
    names = {service.name for service in response.list_services_response.service}
    assert names == {"pagewire.v1.WorkerService", "grpc.reflection.v1alpha.ServerReflection"}


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
@pytest.mark.parametrize(
    "symbol",
    [
        "pagewire.v1.WorkerService",
        "pagewire.v1.WorkerService.Attach",
        "pagewire.v1.SchedulerOutput",
    ],
)
def test_reflection_finds_services_methods_and_messages(
    channel: grpc.Channel, version: str, symbol: str
) -> None:
    response = reflect(channel, version, file_containing_symbol=symbol)
    files = response.file_descriptor_response.file_descriptor_proto
    names = {descriptor_pb2.FileDescriptorProto.FromString(file).name for file in files}
    assert worker_pb2.DESCRIPTOR.name in names


def test_reflection_says_what_it_does_not_know(channel: grpc.Channel) -> None:
    response = reflect(channel, "v1alpha", file_containing_symbol="pagewire.v1.Nothing")
    assert response.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]


def test_messages_larger_than_the_default_limit_pass_both_ways(channel: grpc.Channel) -> None:
    message = bytes(8 << 20)
    assert channel.unary_unary("/Test/Echo")(message, timeout=TIMEOUT_S) == message
