"""Every tier but the gateway is replaced under forty streams: no client can notice.

Real processes and a tiny model. New requests come all the time, and none of them is refused either.
"""

import json
import signal
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.e2e.conftest import SMALL, Product
from tests.e2e.history import History
from tests.e2e.streams import Streams, assert_unnoticed
from tests.pace import patience
from tests.ports import free_port

pytestmark = pytest.mark.slow
NUM_TOKENS = 120
SHORT = (*SMALL, "--max-model-len", "1024")


@dataclass(slots=True)
class Registering(Product):
    """A product whose second worker is found by its registration."""

    second_port: int = field(default_factory=free_port)

    def start_scheduler(self, *options: str) -> None:
        Product.start_scheduler(
            self, "--accept-registrations", "--drain-timeout-s", "0.2", *options
        )

    def start_second(self) -> None:
        scheduler, own = f"127.0.0.1:{self.scheduler_port}", f"127.0.0.1:{self.second_port}"
        words = ("--register", scheduler, "--advertise", own)
        self.start_worker(*SHORT, *words, port=self.second_port, name="second")

    def groups(self) -> dict[str, dict[str, object]]:
        """The scheduler's groups by their ports."""
        return {g["address"].rpartition(":")[2]: g for g in self.status().get("groups", [])}

    def until_ready_at(self, *ports: int) -> None:
        deadline_s = time.monotonic() + patience(60)
        while {p for p, g in self.groups().items() if g.get("ready")} != set(map(str, ports)):
            assert time.monotonic() < deadline_s, self.log_of("scheduler_svc")
            time.sleep(0.1)

    def end(self, name: str) -> int:
        """Asks a service to end, and returns its exit code."""
        process = self.processes.pop(name)
        process.send_signal(signal.SIGTERM)
        return process.wait(patience(90))


@pytest.fixture(scope="module")
def product(terse_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registering]:
    with Registering(terse_model, tmp_path_factory.mktemp("rolling")) as running:
        running.start_worker(*SHORT)
        running.start_scheduler()
        running.start_gateway()
        running.wait_until_ready()
        yield running


@pytest.fixture(scope="module")
def calm(product: Registering) -> list[History]:
    return Streams(product, NUM_TOKENS).run()


class Newcomers:
    """Short requests over HTTP, one after the other, until it is told to stop."""

    def __init__(self, product: Product) -> None:
        self._url = f"{product.url}/v1/completions"
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.answers: list[str] = []

    def __enter__(self) -> "Newcomers":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join(patience(60))

    def _run(self) -> None:
        body = json.dumps({"prompt": "One, two,", "max_tokens": 4, "temperature": 0}).encode()
        while not self._is_over.is_set():
            request = urllib.request.Request(self._url, body, {"content-type": "application/json"})
            try:
                with urllib.request.urlopen(request, timeout=patience(30)) as answer:
                    self.answers.append(json.load(answer)["choices"][0]["text"])
            except OSError as error:
                self.answers.append(f"failed: {error}")
            self._is_over.wait(0.02)

    def assert_unnoticed(self) -> None:
        assert len(self.answers) > 1
        assert len(set(self.answers)) == 1 and "failed" not in self.answers[0], self.answers


def test_a_worker_is_replaced_by_one_that_registers(
    product: Registering, calm: list[History]
) -> None:
    codes = []

    def replace(streams: Streams) -> None:
        assert streams.wait_for_tokens(100)
        product.start_second()
        product.until_ready_at(product.worker_port, product.second_port)
        codes.append(product.end("worker_svc"))

    with Newcomers(product) as newcomers:
        seen = Streams(product, NUM_TOKENS).run(replace)
        product.until_ready_at(product.second_port)
        again = Streams(product, NUM_TOKENS).run()
    assert codes == [0]
    assert_unnoticed(seen, calm)
    assert_unnoticed(again, calm)
    newcomers.assert_unnoticed()
    assert "num_losses" not in product.groups()[str(product.worker_port)], "it was cut off"
    # Back: the first one starts again, the second one says that it ends.
    product.start_worker(*SHORT)
    product.until_ready_at(product.worker_port, product.second_port)
    assert product.end("second") == 0
    product.until_ready_at(product.worker_port)
    assert str(product.second_port) not in product.groups(), "it has deregistered"


def test_a_scheduler_hands_its_requests_over_to_the_next_one(product: Registering) -> None:
    codes = []
    num_tokens = 3 * NUM_TOKENS  # they last until the third one serves
    calm = Streams(product, num_tokens).run()

    def replace(streams: Streams) -> None:
        for _ in range(3):
            assert streams.wait_for_tokens(300)
            codes.append(product.end("scheduler_svc"))
            product.start_scheduler()
            # Tokens that were on their way may come before it serves, and a process that has only
            # begun dies of SIGTERM.
            product.status()

    with Newcomers(product) as newcomers:
        seen = Streams(product, num_tokens).run(replace)
    assert codes == [0, 0, 0]
    assert_unnoticed(seen, calm)
    newcomers.assert_unnoticed()
    assert product.read_log("gateway").count("new requests wait for the next") == 3


def test_a_scheduler_that_takes_over_while_the_other_still_runs(
    product: Registering, calm: list[History]
) -> None:
    """A surge: the next one attaches to the worker, which ends the one before with status 3."""
    codes = []

    def surge(streams: Streams) -> None:
        assert streams.wait_for_tokens(300)
        before = product.processes.pop("scheduler_svc")
        port, product.scheduler_port = product.scheduler_port, free_port()
        metrics, product.scheduler_metrics_port = product.scheduler_metrics_port, free_port()
        product.start_scheduler()  # elsewhere: a Service would have both addresses
        codes.append(before.wait(patience(60)))
        product.scheduler_port, product.scheduler_metrics_port = port, metrics
        product.end("scheduler_svc")
        product.start_scheduler()

    seen = Streams(product, NUM_TOKENS).run(surge)
    assert codes == [3]
    assert_unnoticed(seen, calm)
