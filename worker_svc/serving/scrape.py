"""Metrics of a worker for Prometheus: its steps, its device's idle time, and what it holds now."""

from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from wire.metrics.book import Book
from wire.metrics.exposition import process_metrics
from wire.metrics.grpc_calls import CallCounts, declared_calls
from worker_svc.runner.disk_tier import DiskTier
from worker_svc.runner.picture_outputs import PictureOutputs
from worker_svc.startup.lifecycle import Lifecycle, WorkerPhase

SERVICES = (
    "pagewire.v1.WorkerService",
    "pagewire.v1.DebugService",
    "grpc.health.v1.Health",
)
_PREFIX = "pagewire_worker_"


class WorkerScrape:
    """Reads the metrics, from any thread: a step that is being counted may be half in them."""

    def __init__(self) -> None:
        self._book = Book(declared_calls(SERVICES))
        self._row = self._book.new_row()
        self.calls = CallCounts(self._book, self._row, SERVICES)
        self.lifecycle: Lifecycle | None = None

    def collect(self) -> Iterable[Metric]:
        """All families."""
        if self.lifecycle is not None:
            yield from _of_worker(self.lifecycle)
        yield from self._book.read([*self._row])
        yield from process_metrics({})


def _of_worker(lifecycle: Lifecycle) -> Iterator[Metric]:
    phases = GaugeMetricFamily(
        f"{_PREFIX}phase", "The phase of its start: 1 for the one it is in.", labels=["phase"]
    )
    for phase in WorkerPhase:
        phases.add_metric([phase.name.lower()], float(phase is lifecycle.phase))
    yield phases
    description, runner = lifecycle.description, lifecycle.runner
    if description is not None:
        yield _gauge("kv_blocks", "KV blocks on the device.", description.num_blocks)
        yield _gauge("host_blocks", "Blocks in host memory.", description.num_host_blocks)
    if runner is not None:
        num_slots = len(runner.state.table.live_slots)
        yield _gauge("slots_in_use", "Requests that hold a slot.", num_slots)
        yield from runner.counts.book.read([*runner.counts.row])
        if runner.disk_tier is not None:
            yield from _of_disk(runner.disk_tier)
        if runner.state.pictures is not None:
            yield from _of_pictures(runner.state.pictures)


def _of_pictures(pictures: PictureOutputs) -> Iterator[Metric]:
    prepared = CounterMetricFamily(
        f"{_PREFIX}pictures", "Pictures of prompts that were encoded, or found so.", labels=["how"]
    )
    prepared.add_metric(["encoded"], pictures.num_encoded)
    prepared.add_metric(["found"], pictures.num_found)
    yield prepared
    text = "Bytes of what the encoder made of pictures, kept by content."
    yield _gauge("picture_cache_bytes", text, pictures.num_bytes)


def _of_disk(disk: DiskTier) -> Iterator[Metric]:
    yield _gauge("disk_tier_blocks", "Blocks in files of the disk tier.", disk.num_blocks)
    text = "1 once the disk was full or failed: the tier is read and not written; or 0."
    yield _gauge("disk_tier_write_off", text, float(bool(disk.why_not_written)))


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(_PREFIX + name, text, value=value)
