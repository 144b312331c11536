"""Spans of requests: made by hand with times of the service's clock, exported in batches.

Ending a span only appends it to a bounded queue; a thread exports. What does not fit is dropped.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import (
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    StatusCode,
    TraceFlags,
    TraceState,
    set_span_in_context,
)
from opentelemetry.trace import Tracer as OtelTracer

from wire.tracing.context import TraceContext
from wire.tracing.options import TracingOptions

CLOSE_S = 2.0  # most that the last export holds up the end of the process
Attribute = str | bool | int | float | Sequence[str]
Attributes = Mapping[str, Attribute]
# Of these, each failed attempt has a line of its own; one warning takes their place.
_NOISY = (
    "opentelemetry.exporter.otlp.proto.grpc.exporter",
    "opentelemetry.sdk._shared_internal",
)

log = logging.getLogger("wire.tracing")


class Tracer:
    """Makes the spans of one service."""

    def __init__(
        self, options: TracingOptions, service: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        assert options.endpoint is not None
        ratio = options.sample_ratio
        self._clock = clock
        self._provider = TracerProvider(
            sampler=None if ratio is None else ParentBased(TraceIdRatioBased(ratio)),
            resource=_resource(service),
            shutdown_on_exit=False,
        )
        exporter = _TellingExporter(options.endpoint)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("pagewire")

    def begin(
        self,
        name: str,
        parent: TraceContext | None,
        begin_s: float,
        attributes: Attributes | None = None,
        kind: SpanKind = SpanKind.SERVER,
    ) -> "RequestSpan":
        """Begins a span under the caller's, or a trace."""
        to_ns = round((time.time() - self._clock()) * 1e9)
        context = None if parent is None else _otel_context(parent)
        span = self._tracer.start_span(
            name,
            context or Context(),
            kind,
            attributes,
            start_time=to_ns + round(begin_s * 1e9),
        )
        return RequestSpan(self._tracer, span, to_ns)

    def close(self) -> None:
        """Exports what is left, in two seconds at most."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(CLOSE_S)


class RequestSpan:
    """A span with its children, by times of the service's clock, in seconds."""

    __slots__ = ("_span", "_to_ns", "_tracer", "context", "is_recorded")

    def __init__(self, tracer: OtelTracer, span: Span, to_ns: int) -> None:
        self._tracer = tracer
        self._span = span
        self._to_ns = to_ns  # from the service's clock to that of the world
        found = span.get_span_context()
        flags = int(found.trace_flags)
        self.context = TraceContext(
            f"00-{found.trace_id:032x}-{found.span_id:016x}-{flags:02x}",
            found.trace_state.to_header(),
        )
        self.is_recorded = span.is_recording()

    @property
    def trace_id(self) -> str:
        """The trace id of a recorded span, for logs; else empty."""
        return self.context.trace_id if self.is_recorded else ""

    def child(
        self,
        name: str,
        begin_s: float,
        end_s: float,
        attributes: Attributes | None = None,
        events: Sequence[tuple[str, float, Attributes]] = (),
    ) -> None:
        """Adds a child that is over."""
        if not self.is_recorded:
            return
        context = set_span_in_context(self._span, Context())
        span = self._tracer.start_span(
            name, context, attributes=attributes, start_time=self._ns(begin_s)
        )
        for event, at_s, more in events:
            span.add_event(event, more, self._ns(at_s))
        span.end(self._ns(max(end_s, begin_s)))

    def event(self, name: str, at_s: float, attributes: Attributes | None = None) -> None:
        """Adds an event."""
        self._span.add_event(name, attributes, self._ns(at_s))

    def end(self, at_s: float, attributes: Attributes | None = None, error: str = "") -> None:
        """Ends it; `error` names what failed, and is never text of a prompt."""
        if attributes:
            self._span.set_attributes(dict(attributes))
        if error:
            self._span.set_attribute("error.type", error)
            self._span.set_status(StatusCode.ERROR)
        self._span.end(self._ns(at_s))

    def _ns(self, at_s: float) -> int:
        return self._to_ns + round(at_s * 1e9)


class _TellingExporter(SpanExporter):
    """OTLP by gRPC, which says once that it fails, and once that it works again."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._reason = ""
        self._fails = False
        for name in _NOISY:
            logging.getLogger(name).addFilter(self._note)
        self._exporter = OTLPSpanExporter(endpoint=endpoint)

    def _note(self, record: logging.LogRecord) -> bool:
        self._reason = record.getMessage()
        return False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Sends a batch; called by the exporting thread alone."""
        result = self._exporter.export(spans)
        fails = result is not SpanExportResult.SUCCESS
        if fails and not self._fails:
            log.warning("traces are lost, %s does not take them: %s", self._endpoint, self._reason)
        elif self._fails and not fails:
            log.info("%s takes traces again", self._endpoint)
        self._fails = fails
        return result

    def shutdown(self) -> None:
        """Ends the connection."""
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Nothing is kept here."""
        return True


def _otel_context(parent: TraceContext) -> Context:
    state = TraceState.from_header([parent.tracestate]) if parent.tracestate else None
    flags = TraceFlags(int(parent.traceparent[53:], 16))
    there = SpanContext(int(parent.trace_id, 16), int(parent.span_id, 16), True, flags, state)
    return set_span_in_context(NonRecordingSpan(there), Context())


def _resource(service: str) -> Resource:
    """Facts of this process in all spans; a name in OpenTelemetry's variables goes before ours."""
    found = Resource.create()
    name = str(found.attributes.get(SERVICE_NAME, ""))
    if name and not name.startswith("unknown_service"):  # the library's own default
        return found
    return found.merge(Resource({SERVICE_NAME: f"pagewire-{service}"}))
