"""Opens the tracer of a service; the one place that leads to OpenTelemetry."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from wire.tracing.options import TracingOptions

if TYPE_CHECKING:
    from wire.tracing.spans import Tracer


class NoTracing(RuntimeError):
    """Raised when traces are wanted and OpenTelemetry is not installed."""


def open_tracer(
    options: TracingOptions, service: str, clock: Callable[[], float] = time.monotonic
) -> "Tracer | None":
    """The tracer of a service, whose times are seconds of `clock`; None when tracing is off.

    Raises NoTracing.
    """
    if options.endpoint is None:
        return None
    try:
        from wire.tracing.spans import Tracer  # noqa: PLC0415 - free when off
    except ImportError as error:
        raise NoTracing(
            f"--otlp-endpoint needs OpenTelemetry: pip install 'pagewire[trace]' ({error})"
        ) from error
    return Tracer(options, service, clock)
