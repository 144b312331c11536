"""Declarations of metrics: what they are called and how they are divided, without any number."""

from dataclasses import dataclass
from enum import Enum

# Seconds: from half a millisecond, a decode step of a small model, to five minutes.
SECONDS = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0),
)
TOKENS = (1.0, 4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0, 16384.0, 65536.0, 262144.0)


class MetricKind(Enum):
    """The behaviour of a number: Prometheus' types."""

    COUNTER = "counter"  # only grows
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Declared:
    """One metric. Names of counters end in `_total`; units are seconds, bytes and tokens.

    With labels there is one series for each entry of `series`, known from the start: so that it
    begins at 0, and so that no caller can add one.
    """

    kind: MetricKind
    name: str
    text: str
    labels: tuple[str, ...] = ()
    series: tuple[tuple[str, ...], ...] = ((),)
    bounds: tuple[float, ...] = ()  # of a histogram's buckets, without infinity
    is_sparse: bool = False  # a series is shown from its first event on: most never have one

    @property
    def num_cells(self) -> int:
        """Cells of one series: a histogram has one for each bucket, and one for the sum."""
        return len(self.bounds) + 2 if self.kind is MetricKind.HISTOGRAM else 1


def counter(
    name: str, text: str, label: str = "", values: tuple[str, ...] = (), *, is_sparse: bool = False
) -> Declared:
    """A number that only grows, divided by at most one label."""
    return _with_label(Declared(MetricKind.COUNTER, name, text, is_sparse=is_sparse), label, values)


def gauge(name: str, text: str) -> Declared:
    """A number that goes up and down."""
    return Declared(MetricKind.GAUGE, name, text)


def histogram(
    name: str,
    text: str,
    label: str = "",
    values: tuple[str, ...] = (),
    bounds: tuple[float, ...] = SECONDS,
    *,
    is_sparse: bool = False,
) -> Declared:
    """Durations in seconds by default, divided by at most one label."""
    one = Declared(MetricKind.HISTOGRAM, name, text, bounds=bounds, is_sparse=is_sparse)
    return _with_label(one, label, values)


def _with_label(declared: Declared, label: str, values: tuple[str, ...]) -> Declared:
    if not label:
        return declared
    series = tuple((value,) for value in values)
    return Declared(
        declared.kind,
        declared.name,
        declared.text,
        (label,),
        series,
        declared.bounds,
        declared.is_sparse,
    )
