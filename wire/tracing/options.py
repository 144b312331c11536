"""The tracing options of every service, and what OpenTelemetry's own variables say beyond them."""

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_SCHEMES = ("http://", "https://")


@dataclass(frozen=True, slots=True)
class TracingOptions:
    """The target of spans, and the share of requests with any. By default nothing is traced."""

    endpoint: str | None = None  # None: nothing is traced
    sample_ratio: float | None = None  # None: by OTEL_TRACES_SAMPLER, or every request


def add_tracing_options(parser: argparse.ArgumentParser) -> None:
    """Options of every service."""
    add = parser.add_argument
    text = "send traces to this OTLP collector by gRPC, as http://HOST:4317 (default: no traces)"
    add("--otlp-endpoint", metavar="URL", help=text)
    text = "share of the requests to trace, 0 to 1, of those whose caller has not decided it"
    add("--trace-sample-ratio", type=float, metavar="SHARE", help=text)


def take_tracing(
    options: dict[str, Any], environ: Mapping[str, str] = os.environ
) -> TracingOptions:
    """Removes the tracing options from `options`; returns them as one value.

    The variables of OpenTelemetry stand for options that were not given; OTEL_SDK_DISABLED and
    OTEL_TRACES_EXPORTER=none turn all off. Raises ValueError, naming option or variable.
    """
    endpoint, ratio = options.pop("otlp_endpoint", None), options.pop("trace_sample_ratio", None)
    if ratio is not None and not 0 <= ratio <= 1:
        raise ValueError(f"--trace-sample-ratio: {ratio} is not in [0, 1]")
    if endpoint is not None:
        _check_endpoint("--otlp-endpoint", endpoint)
        return TracingOptions(endpoint, ratio)
    endpoint = _from_environment(environ)
    if endpoint is None and ratio is not None:
        raise ValueError("--trace-sample-ratio needs --otlp-endpoint")
    return TracingOptions(endpoint, ratio)


def _from_environment(environ: Mapping[str, str]) -> str | None:
    """The collector that OpenTelemetry's variables name, if any."""
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    exporter = environ.get("OTEL_TRACES_EXPORTER", "otlp").strip().lower()
    name = next((name for name in _ENDPOINTS if environ.get(name)), None)
    if name is None or exporter == "none":
        return None
    if exporter not in ("otlp", ""):
        raise ValueError(f"OTEL_TRACES_EXPORTER: {exporter!r} is not known here; otlp and none are")
    protocol = next((name for name in _PROTOCOLS if environ.get(name)), None)
    if protocol is not None and environ[protocol] != "grpc":
        raise ValueError(f"{protocol}: {environ[protocol]!r} is not spoken here; grpc is")
    _check_endpoint(name, environ[name])
    return environ[name]


def _check_endpoint(name: str, endpoint: str) -> None:
    if not endpoint.startswith(_SCHEMES) or not endpoint.partition("://")[2]:
        raise ValueError(f"{name}: {endpoint!r} is not http://HOST:PORT or https://HOST:PORT")
