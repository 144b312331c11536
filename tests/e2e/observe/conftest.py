"""Three services whose spans go to a collector, and whose logs are JSON lines."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import SMALL, Product
from tests.otlp_sink import OtlpSink


@dataclass(slots=True)
class Observed:
    """The services and their collector."""

    product: Product
    sink: OtlpSink

    def complete(self, headers: dict[str, str] | None = None, **body: Any) -> dict[str, Any]:
        """An answer of the gateway over HTTP."""
        given = {"prompt": "Once upon a time", "max_tokens": 12, "ignore_eos": True, **body}
        response = self.product.post("/v1/completions", given, headers)
        answer: dict[str, Any] = response.raise_for_status().json()
        return answer

    def lines(self, service: str) -> list[dict[str, Any]]:
        """The log of a service; fails for a line that is no JSON object."""
        return [json.loads(line) for line in self.product.read_log(service).splitlines()]


@pytest.fixture(scope="session")
def observed(terse_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Observed]:
    sink = OtlpSink()
    sink.start()
    endpoint = ("--otlp-endpoint", f"http://127.0.0.1:{sink.port}")
    product = Product(
        terse_model,
        tmp_path_factory.mktemp("observed-logs"),
        SMALL,
        options=(*endpoint, "--log-format", "json", "--log-level", "debug"),
        environ={"OTEL_BSP_SCHEDULE_DELAY": "100", "OTEL_EXPORTER_OTLP_TIMEOUT": "1"},
    )
    try:
        product.start_worker()
        product.start_scheduler("--log-steps")
        product.start_gateway()
        product.wait_until_ready()
        yield Observed(product, sink)
        assert product.stop() == {"worker_svc": 0, "scheduler_svc": 0, "gateway": 0}
    finally:
        product.kill()
        sink.stop()
