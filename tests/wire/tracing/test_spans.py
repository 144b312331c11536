"""The tracer against a collector that lives, and one that does not."""

import logging
import time
from typing import Any

import pytest
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace.export import SpanExportResult

from tests.otlp_sink import OtlpSink
from tests.pace import patience
from tests.ports import free_port
from wire.tracing.context import read_context
from wire.tracing.options import TracingOptions
from wire.tracing.spans import CLOSE_S, Tracer

PARENT = read_context(f"00-{'a' * 32}-{'b' * 16}-01", "k=v")
QUEUE = 2048  # spans, by default


def test_times_are_those_of_the_services_clock() -> None:
    sink = OtlpSink()
    sink.start()
    tracer = Tracer(TracingOptions(f"http://127.0.0.1:{sink.port}"), "test", time.monotonic)
    now_s, now_ns = time.monotonic(), time.time_ns()
    span = tracer.begin("whole", PARENT, now_s - 2.0, {"n": 1})
    span.child("part", now_s - 1.5, now_s - 1.0, events=[("moment", now_s - 1.25, {})])
    span.end(now_s, error="overloaded")
    tracer.close()
    sink.stop()
    spans = {one.span.name: one.span for one in sink.of("a" * 32)}
    whole, part = spans["whole"], spans["part"]
    assert whole.end_time_unix_nano - whole.start_time_unix_nano == pytest.approx(2e9, abs=10)
    assert part.start_time_unix_nano - whole.start_time_unix_nano == pytest.approx(5e8, abs=10)
    assert part.events[0].time_unix_nano - part.start_time_unix_nano == pytest.approx(25e7, abs=10)
    assert abs(whole.end_time_unix_nano - now_ns) < patience(0.5) * 1e9
    assert (whole.status.code, part.parent_span_id) == (2, whole.span_id)
    assert whole.parent_span_id.hex() == "b" * 16


def test_the_caller_decides_and_else_the_ratio_does() -> None:
    tracer = Tracer(TracingOptions("http://127.0.0.1:1", 0.0), "test")
    assert not tracer.begin("x", None, 0.0).is_recorded
    assert tracer.begin("x", PARENT, 0.0).is_recorded
    unsampled = read_context(f"00-{'a' * 32}-{'b' * 16}-00")
    span = tracer.begin("x", unsampled, 0.0)
    assert not span.is_recorded and not span.context.is_sampled and not span.trace_id
    assert span.context.trace_id == "a" * 32  # and so the next service knows, too
    tracer.close()


def test_without_a_collector_spans_are_dropped_and_one_line_says_so(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    port = free_port()
    attempts, export = [], OTLPSpanExporter.export

    def counted(exporter: OTLPSpanExporter, batch: Any) -> SpanExportResult:
        result = export(exporter, batch)
        attempts.append(result)
        return result

    monkeypatch.setattr(OTLPSpanExporter, "export", counted)
    tracer = Tracer(TracingOptions(f"http://127.0.0.1:{port}"), "test")
    with caplog.at_level(logging.DEBUG):
        for number in range(3 * QUEUE):  # nothing waits, and nothing grows
            tracer.begin(f"span {number}", PARENT, time.monotonic()).end(time.monotonic())
        deadline_s = time.monotonic() + patience(20)
        while len(attempts) < 3 and time.monotonic() < deadline_s:
            time.sleep(0.05)
        began_s = time.monotonic()
        tracer.close()
        assert time.monotonic() - began_s < CLOSE_S + patience(1.0)
    assert attempts[:3] == [SpanExportResult.FAILURE] * 3
    ours = [line for line in caplog.messages if "traces are lost" in line]
    assert len(ours) == 1 and f"127.0.0.1:{port}" in ours[0]
    names = {record.name for record in caplog.records}
    assert not [name for name in names if name.startswith("opentelemetry")], names


@pytest.mark.parametrize(
    ("variable", "value", "name"),
    [
        ("OTEL_SERVICE_NAME", "", "pagewire-test"),
        ("OTEL_SERVICE_NAME", "mine", "mine"),
        ("OTEL_RESOURCE_ATTRIBUTES", "service.name=mine,a=b", "mine"),
        ("OTEL_RESOURCE_ATTRIBUTES", "a=b", "pagewire-test"),
    ],
)
def test_the_service_has_our_name_unless_a_variable_gives_another(
    variable: str, value: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    tracer = Tracer(TracingOptions("http://127.0.0.1:1"), "test")
    assert tracer._provider.resource.attributes["service.name"] == name
    tracer.close()
