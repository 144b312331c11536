"""A plaintext port for kubelets, which speak no TLS: gRPC health's Check, and nothing else."""

from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2

from wire.aio.server import aio_server
from wire.server import SERVER_OPTIONS, bind, register

THREADS = 2
LIVENESS = "liveness"  # a health service's name that is SERVING as long as the process answers
# Of a scheduler: it is not one that stands by for another; it serves, or could at once.
ACTIVE, READY_TO_SERVE = "active", "ready-to-serve"
Check = Callable[[Any, Any], health_pb2.HealthCheckResponse]
AioCheck = Callable[[Any, Any], Awaitable[health_pb2.HealthCheckResponse]]


def aio_health_server(check: AioCheck, address: str, *, shares_port: bool = False) -> Any:
    """A bound grpc.aio server, to be started and stopped. Raises PortInUse."""
    # If an option is given twice, gRPC uses the first.
    options = [("grpc.so_reuseport", int(shares_port)), *SERVER_OPTIONS]
    return _serving(aio_server(options), check, address)


def health_server(check: Check, address: str) -> Any:
    """A bound threaded server, to be started and stopped. Raises PortInUse."""
    threads = ThreadPoolExecutor(THREADS, thread_name_prefix="health")
    return _serving(grpc.server(threads, options=SERVER_OPTIONS), check, address)


def _serving(server: Any, check: Callable[[Any, Any], Any], address: str) -> Any:
    # No Watch: each would hold a thread of the worker for as long as its client likes.
    handler = grpc.unary_unary_rpc_method_handler(
        check,
        health_pb2.HealthCheckRequest.FromString,
        health_pb2.HealthCheckResponse.SerializeToString,
    )
    register(server, health.SERVICE_NAME, {"Check": handler})
    bind(server, address, "the health port (--health-port)")
    return server
