"""Metrics of a gateway for Prometheus: its counters, the present state, and vLLM's names for both.

Each of several processes answers for all of them.
"""

import asyncio
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from gateway.observe import declared
from gateway.observe.meter import RequestMetrics
from gateway.pipeline.pipeline import Pipeline
from gateway.scheduler.link import SchedulerLink
from gateway.scheduler.readiness import ReadinessWatch
from wire.metrics.book import Book
from wire.metrics.exposition import Scraped, process_metrics, scraped
from wire.metrics.grpc_calls import CallCounts, declared_calls
from wire.metrics.shared_rows import MetricRows, SharedMetricRows

SERVICES = (
    "pagewire.v1.InferenceService",
    "pagewire.v1.EmbeddingService",
    "pagewire.v1.DebugService",
    "grpc.health.v1.Health",
)
NOTE_INTERVAL_S = 0.5  # how old the gauges of the other processes may be


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """The rows of all processes of a supervisor, and which one is ours."""

    fd: int
    row: int


class GatewayCounters:
    """The cells of this process: of requests, and of gRPC calls."""

    def __init__(self, shared: SharedMemory | None) -> None:
        own = (*declared.OWN, declared.HTTP_RESPONSES)
        self.book = Book((*own, *declared_calls(SERVICES)))
        self.rows = (
            MetricRows(self.book)
            if shared is None
            else SharedMetricRows(self.book, shared.fd, shared.row)
        )
        self.requests = RequestMetrics(self.book, self.rows.own)
        self.calls = CallCounts(self.book, self.rows.own, SERVICES)


class GatewayScrape:
    """Reads the metrics. Belongs to the event loop's thread."""

    def __init__(
        self,
        counters: GatewayCounters,
        pipeline: Pipeline,
        link: SchedulerLink,
        readiness: ReadinessWatch,
    ) -> None:
        self._counters = counters
        self._pipeline = pipeline
        self._link = link
        self._readiness = readiness

    def answer(self, accept: str) -> Scraped:
        """The text, in the format that the header `accept` asks for."""
        return scraped(self.collect(), accept)

    def collect(self) -> Iterable[Metric]:
        """All families."""
        self._note()
        counters = self._counters
        totals = counters.rows.totals()
        yield from counters.book.read(totals)
        yield GaugeMetricFamily(
            "pagewire_gateway_ready",
            "Whether this process can serve: 1, or 0.",
            value=float(self._readiness.current.is_ready),
        )
        if (model := self._readiness.current.model) is not None:
            yield from self._as_vllm(totals, model.name)
        yield from process_metrics(counters.rows.processes())

    def _as_vllm(self, totals: list[float], model_name: str) -> Iterator[Metric]:
        book, kv = self._counters.book, self._readiness.kv_cache
        for other, name in declared.VLLM.items():
            yield from book.read_as(totals, name, other, [model_name])
        success = declared.VLLM_SUCCESS
        ended = CounterMetricFamily(success.name, success.text, labels=success.labels)
        cells = book.cells(declared.REQUESTS)
        for reason in declared.FINISH_REASONS:
            ended.add_metric([model_name, reason], totals[cells[reason]])
        yield ended
        engine, named = self._readiness.engine, declared.VLLM_PREEMPTIONS
        preemptions = CounterMetricFamily(named.name, named.text, labels=named.labels)
        preemptions.add_metric([model_name], float(engine.num_preemptions))
        yield preemptions
        if engine.steps_by_size:
            sizes_of_steps = engine.steps_by_size, float(engine.num_step_tokens)
            yield book.histogram(declared.VLLM_ITERATIONS, [model_name], *sizes_of_steps)
        usage = declared.VLLM_KV_USAGE
        shown = GaugeMetricFamily(usage.name, usage.text, labels=usage.labels)
        shown.add_metric([model_name], kv.usage)
        yield shown
        config = declared.VLLM_CACHE_CONFIG
        sizes = GaugeMetricFamily(config.name, config.text, labels=config.labels)
        sizes.add_metric([model_name, str(kv.block_size), str(kv.num_blocks)], 1.0)
        yield sizes

    def _note(self) -> None:
        num_running = self._link.num_running
        num_waiting = max(self._pipeline.num_open - num_running, 0)
        self._counters.requests.now(num_running, num_waiting)

    async def keep_noting(self) -> None:
        """Notes how many requests there are for the processes that answer in our place."""
        while True:
            self._note()
            await asyncio.sleep(NOTE_INTERVAL_S)
