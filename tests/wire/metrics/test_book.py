"""Cells of declared numbers, read as Prometheus text."""

import random
from collections.abc import Iterable

import pytest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from wire.metrics.book import Book
from wire.metrics.declared import SECONDS, Declared, MetricKind, counter, gauge, histogram
from wire.metrics.exposition import process_metrics, scraped

DECLARED = (
    counter("x_requests_total", "Requests.", "outcome", ("stop", "length")),
    counter("x_rare_total", "Rare.", "why", ("a", "b"), is_sparse=True),
    gauge("x_running", "Running."),
    histogram("x_wait_seconds", "Waits.", "phase", ("queue",)),
)


def series(*values: str) -> tuple[str, ...]:
    """The values of a series' labels: their text is sorted by the labels' names."""
    return tuple(sorted(values))


def parsed(families: Iterable[Metric]) -> dict[tuple[str, tuple[str, ...]], float]:
    """Samples by name and label values, as Prometheus' own parser reads the text."""
    text = scraped(families).body.decode()
    return {
        (sample.name, series(*sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_what_was_counted_is_what_is_read() -> None:
    book = Book(DECLARED)
    row = book.new_row()
    row[book.cells("x_requests_total")["length"]] += 3
    row[book.at("x_running")] = 2
    row[book.at("x_rare_total", "b")] += 1
    read = parsed(book.read([*row]))
    assert read["x_requests_total", ("stop",)] == 0
    assert read["x_requests_total", ("length",)] == 3
    assert read["x_running", ()] == 2
    assert read["x_rare_total", ("b",)] == 1
    assert ("x_rare_total", ("a",)) not in read, "a series of many that has no event"


def test_a_histogram_counts_each_value_in_all_buckets_that_hold_it() -> None:
    book, draws = Book(DECLARED), random.Random(0)
    row = book.new_row()
    buckets = book.buckets(row, "x_wait_seconds", "queue")
    values = [*SECONDS, *(draws.lognormvariate(-3, 3) for _ in range(200))]
    for value in values:
        buckets.observe(value)
    read = parsed(book.read([*row]))
    for bound in SECONDS:
        expected = sum(value <= bound for value in values)
        assert read["x_wait_seconds_bucket", series("queue", str(bound))] == expected
    assert read["x_wait_seconds_count", ("queue",)] == len(values)
    assert read["x_wait_seconds_sum", ("queue",)] == pytest.approx(sum(values))


def test_a_series_is_read_under_another_name_with_that_names_labels() -> None:
    book = Book(DECLARED)
    row = book.new_row()
    book.buckets(row, "x_wait_seconds", "queue").observe(0.2)
    other = Declared(MetricKind.HISTOGRAM, "y:wait", "Waits.", ("model_name",), bounds=SECONDS)
    read = parsed(book.read_as([*row], "x_wait_seconds", other, ["m"], ("queue",)))
    assert read["y:wait_count", ("m",)] == 1


def test_layouts_are_told_apart() -> None:
    assert Book(DECLARED).signature == Book(DECLARED).signature
    assert Book(DECLARED).signature != Book(DECLARED[:-1]).signature
    assert Book(()).signature > 0


def test_openmetrics_is_served_to_those_who_ask_for_it() -> None:
    book = Book(DECLARED)
    accept = "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"
    answer = scraped([*book.read([*book.new_row()]), *process_metrics({})], accept)
    assert answer.content_type.startswith("application/openmetrics-text")
    assert answer.body.endswith(b"# EOF\n")
