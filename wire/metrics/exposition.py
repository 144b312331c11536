"""Metrics as Prometheus reads them: the text, and what the operating system says of a process."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from prometheus_client.core import CollectorRegistry, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.process_collector import ProcessCollector

Collect = Callable[[], Iterable[Metric]]


@dataclass(frozen=True, slots=True)
class Scraped:
    """The answer to one scrape."""

    body: bytes
    content_type: str


class _Once(CollectorRegistry):
    """Families that have been collected already."""

    def __init__(self, families: Iterable[Metric]) -> None:
        super().__init__()
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def scraped(families: Iterable[Metric], accept: str = "") -> Scraped:
    """The text of the families, in the format that the header `accept` asks for."""
    encode, content_type = choose_encoder(accept)
    return Scraped(encode(_Once(families)), content_type)


def process_metrics(processes: Mapping[int, int]) -> Iterator[Metric]:
    """CPU, memory and files: of this process or, by number, of several of one service."""
    if not processes:
        yield from ProcessCollector(registry=None).collect()
        return
    families: dict[str, Metric] = {}
    for number, pid in processes.items():
        for family in ProcessCollector(pid=partial(int, pid), registry=None).collect():
            first = families.setdefault(
                family.name, Metric(family.name, family.documentation, family.type)
            )
            for sample in family.samples:
                first.add_sample(sample.name, {"process": str(number)}, sample.value)
    yield from families.values()
