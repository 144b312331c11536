"""Options, binding, reflection and health of gRPC servers, asyncio and threaded."""

from collections.abc import Iterable
from typing import Any

import grpc
from google.protobuf import descriptor_pool
from grpc_reflection.v1alpha import reflection
from grpc_reflection.v1alpha import reflection_pb2 as reflection_messages

# Keepalive, so that a lost host frees its streams: clients ping every 10 s; servers, which tolerate
# a client that is stopped for a moment, every 30 s. A server accepts a ping every 5 s, with streams
# or without: `min_ping_interval_...` is the one option name gRPC reads for it,
# `min_recv_ping_interval_...` is ignored silently.
SERVER_OPTIONS: list[tuple[str, int]] = [
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
    # Streams of one connection, and idle connections: clients wait, and connect again unnoticed.
    ("grpc.max_concurrent_streams", 1024),
    ("grpc.max_connection_idle_ms", 600_000),
    ("grpc.so_reuseport", 0),  # a second server on the port is an error
]

CHANNEL_OPTIONS: list[tuple[str, int]] = [
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
]


class PortInUse(RuntimeError):
    """Raised when the address cannot be bound."""


def bind(
    server: Any, address: str, what: str, credentials: grpc.ServerCredentials | None = None
) -> int:
    """Binds a grpc or grpc.aio server to host:port and returns the port; plaintext by default.

    Raises PortInUse, naming the address and `what`.
    """
    try:
        if credentials is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise PortInUse(f"{what} cannot listen on {address}: is the port in use?") from error
    if port == 0:
        raise PortInUse(f"{what} cannot listen on {address}: is the port in use?")
    return int(port)


class MethodAwarePool:
    """The default descriptor pool, which also finds a file by the name of one of its methods.

    The C descriptor pool cannot resolve a method's symbol, which `grpcurl describe` needs.
    """

    def __init__(self) -> None:
        self._pool = descriptor_pool.Default()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def FindFileContainingSymbol(self, symbol: str) -> Any:
        try:
            return self._pool.FindFileContainingSymbol(symbol)
        except KeyError:
            return self._pool.FindMethodByName(symbol).containing_service.file


def add_reflection(server: Any, services: Iterable[str], *, aio: bool) -> None:
    """Serves reflection v1 and v1alpha (wire-identical) for the named services."""
    kind = reflection.aio.ReflectionServicer if aio else reflection.ReflectionServicer
    servicer = kind((*services, reflection.SERVICE_NAME), pool=MethodAwarePool())
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        reflection_messages.ServerReflectionRequest.FromString,
        reflection_messages.ServerReflectionResponse.SerializeToString,
    )
    # v1 is served but not listed: clients that see it listed request a descriptor it lacks.
    for name in ("grpc.reflection.v1.ServerReflection", reflection.SERVICE_NAME):
        register(server, name, {"ServerReflectionInfo": handler})


def register(server: Any, service: str, handlers: dict[str, Any]) -> None:
    """Adds handlers to a server as generated code does: by name, and generic."""
    generic = grpc.method_handlers_generic_handler(service, handlers)
    server.add_generic_rpc_handlers((generic,))
    server.add_registered_method_handlers(service, handlers)
