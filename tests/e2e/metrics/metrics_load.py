"""A scripted load over HTTP whose client counts what it gets, and the metrics before and after."""

import http.client
import json
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.conftest import Product
from tests.pace import patience

Series = tuple[str, frozenset[tuple[str, str]]]


@dataclass(slots=True)
class Counted:
    """A client's view of all its requests; times are sums over them."""

    codes: Counter[int] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    ttft_s: float = 0.0
    until_last_s: float = 0.0  # from sending a request to the last piece of its output
    num_streams: int = 0

    def add_usage(self, usage: dict[str, Any]) -> None:
        self.num_prompt_tokens += usage["prompt_tokens"]
        self.num_output_tokens += usage["completion_tokens"]
        self.num_cached_tokens += usage["prompt_tokens_details"]["cached_tokens"]


class LoadClient:
    """One client that sends requests one after the other."""

    def __init__(self, product: Product) -> None:
        self._product = product
        self.counted = Counted()

    def send(self, **body: Any) -> None:
        """Sends a completion and reads all of its answer."""
        connection = http.client.HTTPConnection(
            "127.0.0.1", self._product.http_port, timeout=patience(60)
        )
        began_s = time.monotonic()
        headers = {"content-type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        answer = connection.getresponse()
        self.counted.codes[answer.status] += 1
        if body.get("stream"):
            self._read_stream(answer, began_s)
        else:
            self._read_whole(json.loads(answer.read()))
        connection.close()

    def _read_whole(self, answer: dict[str, Any]) -> None:
        for choice in answer.get("choices", ()):
            self.counted.reasons[choice["finish_reason"]] += 1
        if "usage" in answer:
            self.counted.add_usage(answer["usage"])

    def _read_stream(self, answer: http.client.HTTPResponse, began_s: float) -> None:
        arrivals = []
        while line := answer.readline():
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line.removeprefix(b"data: "))
            arrivals.append(time.monotonic())
            for choice in event["choices"]:
                if choice["finish_reason"]:
                    self.counted.reasons[choice["finish_reason"]] += 1
            if event.get("usage"):
                self.counted.add_usage(event["usage"])
        self.counted.num_streams += 1
        self.counted.ttft_s += arrivals[0] - began_s
        self.counted.until_last_s += arrivals[-1] - began_s


def run_together(clients: list[LoadClient], bodies: list[dict[str, Any]]) -> None:
    """Each client sends all bodies, at the same time as the others."""
    threads = [
        threading.Thread(target=lambda c=client: [c.send(**body) for body in bodies])
        for client in clients
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(patience(120))
        assert not thread.is_alive()


def leave_a_stream(product: Product, **body: Any) -> None:
    """Sends a request and leaves after the first event of its stream."""
    connection = http.client.HTTPConnection("127.0.0.1", product.http_port, timeout=patience(60))
    headers = {"content-type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    connection.getresponse().readline()
    connection.close()


def read_metrics(url: str) -> str:
    """The text that a service serves to Prometheus."""
    return httpx.get(url, timeout=patience(30)).raise_for_status().text


def urls_of(product: Product) -> dict[str, str]:
    """The URL of each service's metrics."""
    return {
        "gateway": f"{product.url}/metrics",
        "scheduler": f"http://127.0.0.1:{product.scheduler_metrics_port}/metrics",
        "worker": f"http://127.0.0.1:{product.worker_metrics_port}/metrics",
    }


class Scrapes:
    """The samples of all services, as Prometheus' own parser reads them."""

    def __init__(self, product: Product) -> None:
        self.texts = {name: read_metrics(url) for name, url in urls_of(product).items()}
        self._samples: dict[Series, float] = {}
        for text in self.texts.values():
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    key = sample.name, frozenset(sample.labels.items())
                    self._samples[key] = self._samples.get(key, 0.0) + sample.value

    def sum(self, name: str, **labels: str) -> float:
        """The sum over the series of a name that have these labels."""
        wanted = frozenset(labels.items())
        return sum(v for (n, had), v in self._samples.items() if n == name and wanted <= had)


@dataclass(frozen=True, slots=True)
class Growth:
    """The growth between two scrapes."""

    before: Scrapes
    after: Scrapes

    def of(self, name: str, **labels: str) -> float:
        return self.after.sum(name, **labels) - self.before.sum(name, **labels)
