"""A collector that keeps what it gets: the other end of the real OTLP exporter."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.pace import patience


@dataclass(frozen=True, slots=True)
class Received:
    """A span, and the service that made it."""

    service: str
    span: Span

    @property
    def attributes(self) -> dict[str, object]:
        return {
            a.key: getattr(a.value, str(a.value.WhichOneof("value"))) for a in self.span.attributes
        }


@dataclass(slots=True)
class OtlpSink(trace_service_pb2_grpc.TraceServiceServicer):  # type: ignore[misc]
    """Call start(), then stop()."""

    port: int = 0
    received: list[Received] = field(default_factory=list)
    raw: list[bytes] = field(default_factory=list)
    _server: grpc.Server | None = None

    def Export(
        self, request: pb.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> pb.ExportTraceServiceResponse:
        self.raw.append(request.SerializeToString())
        for resource in request.resource_spans:
            names = [
                a.value.string_value
                for a in resource.resource.attributes
                if a.key == "service.name"
            ]
            for scope in resource.scope_spans:
                self.received += [Received(names[0], span) for span in scope.spans]
        return pb.ExportTraceServiceResponse()

    def start(self) -> None:
        self._server = grpc.server(ThreadPoolExecutor(4))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        self._server.start()

    def stop(self) -> None:
        assert self._server is not None
        self._server.stop(None).wait()

    def of(self, trace_id: str) -> list[Received]:
        """The spans of a trace, by its id in hexadecimal."""
        return [r for r in self.received if r.span.trace_id.hex() == trace_id]

    def wait_for(
        self, trace_id: str, is_complete: Callable[[set[tuple[str, str]]], bool]
    ) -> list[Received]:
        """The spans of a trace, once those of (service, name) are complete."""
        deadline_s = time.monotonic() + patience(20.0)
        while True:
            found = self.of(trace_id)
            names = {(r.service.removeprefix("pagewire-"), r.span.name) for r in found}
            if is_complete(names):
                return found
            assert time.monotonic() < deadline_s, sorted(names)
            time.sleep(0.05)
