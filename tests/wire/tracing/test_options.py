"""When requests are traced, by options and by OpenTelemetry's variables."""

import pytest

from wire.tracing.options import TracingOptions, take_tracing

URL = "http://collector:4317"


def taken(environ: dict[str, str] | None = None, **options: object) -> TracingOptions:
    return take_tracing(dict(options), environ or {})


def test_by_default_nothing_is_traced() -> None:
    assert taken() == TracingOptions()
    assert taken(otlp_endpoint=None, trace_sample_ratio=None) == TracingOptions()


def test_the_option_goes_before_the_variables() -> None:
    there = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://other:1"}
    assert taken(there).endpoint == "http://other:1"
    assert taken(there, otlp_endpoint=URL, trace_sample_ratio=0.25) == TracingOptions(URL, 0.25)
    special = there | {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": URL}
    assert taken(special).endpoint == URL
    assert taken({"OTEL_SDK_DISABLED": "true"}, otlp_endpoint=URL).endpoint == URL


@pytest.mark.parametrize("name", ["OTEL_SDK_DISABLED=true", "OTEL_TRACES_EXPORTER=none"])
def test_a_variable_can_turn_the_variables_off(name: str) -> None:
    variable, _, value = name.partition("=")
    assert taken({"OTEL_EXPORTER_OTLP_ENDPOINT": URL, variable: value}) == TracingOptions()


@pytest.mark.parametrize(
    ("environ", "options", "problem"),
    [
        ({}, {"otlp_endpoint": "collector:4317"}, "--otlp-endpoint: 'collector:4317' is not"),
        ({}, {"otlp_endpoint": "http://"}, "--otlp-endpoint"),
        ({}, {"trace_sample_ratio": 0.5}, "--trace-sample-ratio needs --otlp-endpoint"),
        ({}, {"otlp_endpoint": URL, "trace_sample_ratio": 1.5}, "--trace-sample-ratio: 1.5"),
        ({}, {"otlp_endpoint": URL, "trace_sample_ratio": float("nan")}, "--trace-sample-ratio"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "c:1"}, {}, "OTEL_EXPORTER_OTLP_ENDPOINT: 'c:1' is not"),
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": URL, "OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"},
            {},
            "OTEL_EXPORTER_OTLP_PROTOCOL: 'http/json' is not spoken here",
        ),
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": URL, "OTEL_TRACES_EXPORTER": "zipkin"},
            {},
            "OTEL_TRACES_EXPORTER: 'zipkin' is not known here",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    environ: dict[str, str], options: dict[str, object], problem: str
) -> None:
    with pytest.raises(ValueError, match=problem.replace("(", "\\(")):
        taken(environ, **options)
