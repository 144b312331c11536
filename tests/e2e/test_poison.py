"""A request that kills every worker that computes it: ended after the second death, alone."""

import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Product

pytestmark = pytest.mark.slow
FAILPOINT = ("--failpoint", "poison@1")
NUM_OTHERS = 4


@pytest.fixture
def poisoned(terse_model: Path, tmp_path: Path) -> Iterator[Product]:
    """A product of its own, whose worker dies at the first step of a request named so."""
    small = ("--threads", "1", "--kv-cache-gib", "0.2", *FAILPOINT)
    with Product(terse_model, tmp_path, small) as running:
        running.start()
        yield running
        assert running.stop() == {"worker_svc": 0, "scheduler_svc": 0, "gateway": 0}


def _complete(product: Product, name: str, max_tokens: int = 60) -> tuple[int, dict[str, Any]]:
    body = {
        "prompt": f"Once upon a time, {name[-1]}",
        "request_id": name,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "seed": 7,
    }
    answer = product.post("/v1/completions", body)
    if answer.is_success:
        return answer.status_code, answer.json()
    return answer.status_code, {**answer.json(), "retry": answer.headers.get("x-should-retry")}


class _Restarts:
    """Starts the worker again whenever it has died, until stopped."""

    def __init__(self, product: Product) -> None:
        self._product = product
        self._over = threading.Event()
        self.num_deaths = 0
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._over.is_set():
            worker: subprocess.Popen[bytes] = self._product.processes["worker_svc"]
            if worker.poll() is None:
                self._over.wait(0.05)
                continue
            self.num_deaths += 1
            self._product.start_worker()

    def stop(self) -> None:
        self._over.set()
        self._thread.join()


def test_a_request_that_kills_workers_ends_after_the_second_and_hurts_no_other(
    poisoned: Product,
) -> None:
    names = [f"r{number}" for number in range(NUM_OTHERS)]
    calm = {name: _complete(poisoned, f"calm-{name}") for name in names}
    assert all(status == 200 for status, _ in calm.values())
    restarts = _Restarts(poisoned)
    try:
        with ThreadPoolExecutor(NUM_OTHERS + 1) as pool:
            asking = {name: pool.submit(_complete, poisoned, name) for name in names}
            status, error = pool.submit(_complete, poisoned, "poison").result()
            ends = {name: one.result() for name, one in asking.items()}
    finally:
        restarts.stop()
    assert status == 500 and error["error"]["code"] == "request_poisonous"
    assert "2 processes in a row died" in error["error"]["message"]
    assert error["retry"] == "false"
    # A third where the step before was the oldest in flight: the first death counts for that one.
    assert restarts.num_deaths in (2, 3)
    for name in names:
        assert ends[name][0] == 200, ends[name]
        assert ends[name][1]["choices"] == calm[name][1]["choices"]
    assert "num_running" not in poisoned.status()
