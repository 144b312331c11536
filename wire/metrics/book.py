"""Each declared number is kept in cells of float64 in a row, and a row reads as metrics.

Counting is an addition to a cell, some tens of nanoseconds; names, labels and text cost nothing
before they are read. A row belongs to one thread, or to callers that exclude each other.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import TypeAlias

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from wire.metrics.declared import Declared, MetricKind

Row: TypeAlias = "memoryview[float]"


class Buckets:
    """A histogram in a row: one cell per bucket and one for the sum."""

    __slots__ = ("_at", "_bounds", "_row", "_sum_at")

    def __init__(self, row: Row, at: int, bounds: tuple[float, ...]) -> None:
        self._row = row
        self._at = at
        self._bounds = bounds
        self._sum_at = at + len(bounds) + 1

    def observe(self, value: float) -> None:
        """Counts one value; costs some hundred nanoseconds."""
        row = self._row
        row[self._at + bisect_left(self._bounds, value)] += 1.0
        row[self._sum_at] += value

    @property
    def counts(self) -> list[int]:
        """Values counted in each bucket, the last one without a bound."""
        return [int(count) for count in self._row[self._at : self._sum_at]]

    @property
    def total(self) -> float:
        """The sum of the values."""
        return self._row[self._sum_at]


class Book:
    """The layout of a row: the same declarations always give the same."""

    def __init__(self, declared: Iterable[Declared]) -> None:
        self._declared = tuple(declared)
        self._places: dict[tuple[str, tuple[str, ...]], int] = {}
        self._by_name = {one.name: one for one in self._declared}
        self.num_cells = 0
        for one in self._declared:
            for series in one.series:
                self._places[one.name, series] = self.num_cells
                self.num_cells += one.num_cells

    @property
    def signature(self) -> float:
        """The same for equal layouts alone; exact as a float64."""
        digest = blake2b(repr(self._declared).encode(), digest_size=6).digest()
        return float(int.from_bytes(digest, "little") + 1)

    @property
    def gauges(self) -> list[int]:
        """The cells that say how things are now, and nothing of a process that has ended."""
        return [
            self._places[one.name, series]
            for one in self._declared
            if one.kind is MetricKind.GAUGE
            for series in one.series
        ]

    def new_row(self) -> Row:
        """Cells of this process alone, all 0."""
        return memoryview(bytearray(8 * self.num_cells)).cast("d")

    def at(self, name: str, *labels: str) -> int:
        """The cell of a counter or gauge. Raises KeyError for a series that is not declared."""
        return self._places[name, labels]

    def cells(self, name: str) -> dict[str, int]:
        """The cells of a counter with one label, by that label's values."""
        return {series[0]: self._places[name, series] for series in self._by_name[name].series}

    def buckets(self, row: Row, name: str, *labels: str) -> Buckets:
        """A histogram of the row. Raises KeyError for a series that is not declared."""
        return Buckets(row, self._places[name, labels], self._by_name[name].bounds)

    def read(self, totals: Sequence[float]) -> Iterator[Metric]:
        """The metrics of a row, or of the sum of several."""
        for one in self._declared:
            yield from self._family(one, totals)

    def read_as(
        self,
        totals: Sequence[float],
        name: str,
        other: Declared,
        labels: Sequence[str],
        series: tuple[str, ...] = (),
    ) -> Iterator[Metric]:
        """One series of a metric under another name, `other`, with that one's labels."""
        one, family = self._by_name[name], _empty(other)
        self._add(family, one, series, totals, labels)
        yield family

    @staticmethod
    def histogram(
        other: Declared, labels: Sequence[str], counts: Sequence[float], total: float
    ) -> Metric:
        """A histogram whose buckets another process has counted, by the bounds of `other`."""
        family = _empty(other)
        assert isinstance(family, HistogramMetricFamily)
        family.add_metric(labels, _cumulated(other.bounds, counts), total)
        return family

    def _family(self, one: Declared, totals: Sequence[float]) -> Iterator[Metric]:
        family = _empty(one)
        for series in one.series:
            at = self._places[one.name, series]
            if not one.is_sparse or any(totals[at : at + one.num_cells]):
                self._add(family, one, series, totals, series)
        yield family

    def _add(
        self,
        family: Metric,
        one: Declared,
        series: tuple[str, ...],
        totals: Sequence[float],
        labels: Sequence[str],
    ) -> None:
        at = self._places[one.name, series]
        cells = totals[at : at + one.num_cells]
        if isinstance(family, HistogramMetricFamily):
            family.add_metric(labels, _cumulated(one.bounds, cells), cells[-1])
        else:
            assert isinstance(family, CounterMetricFamily | GaugeMetricFamily)
            family.add_metric(labels, cells[0])


_EMPTY = {
    MetricKind.COUNTER: CounterMetricFamily,
    MetricKind.GAUGE: GaugeMetricFamily,
    MetricKind.HISTOGRAM: HistogramMetricFamily,
}


def _empty(one: Declared) -> Metric:
    family: Metric = _EMPTY[one.kind](one.name, one.text, labels=one.labels)
    return family


def _cumulated(bounds: Sequence[float], cells: Sequence[float]) -> list[tuple[str, float]]:
    """Each bucket with all before it, as Prometheus has them."""
    cumulated, so_far = [], 0.0
    for bound, count in zip([*map(str, bounds), "+Inf"], cells, strict=False):
        so_far += count
        cumulated.append((bound, so_far))
    return cumulated
