"""Requests that run move with their KV when their worker ends: nothing is computed twice."""

import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.history import History
from tests.e2e.rolling.test_rolling_upgrade import NUM_TOKENS, SHORT, Registering
from tests.e2e.streams import Streams, assert_unnoticed
from tests.pace import patience

pytestmark = pytest.mark.slow
MOVING = (*SHORT, "--kv-transport", "tcp")


@dataclass(slots=True)
class MovingProduct(Registering):
    """A product whose workers pull KV from each other."""

    def start_second(self) -> None:
        scheduler, own = f"127.0.0.1:{self.scheduler_port}", f"127.0.0.1:{self.second_port}"
        words = ("--register", scheduler, "--advertise", own)
        self.start_worker(*MOVING, *words, port=self.second_port, name="second")

    def until_ready_at_least(self, port: int) -> None:
        deadline_s = time.monotonic() + patience(60)
        while not self.groups().get(str(port), {}).get("ready"):
            assert time.monotonic() < deadline_s, self.log_of("scheduler_svc")
            time.sleep(0.1)

    def counted(self, name: str) -> float:
        """A counter of the scheduler, over all groups."""
        url = f"http://127.0.0.1:{self.scheduler_metrics_port}/metrics"
        found = text_string_to_metric_families(httpx.get(url, timeout=patience(30)).text)
        full = f"pagewire_scheduler_{name}"
        return sum(s.value for family in found for s in family.samples if s.name == full)


@pytest.fixture(scope="module")
def product(terse_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MovingProduct]:
    with MovingProduct(terse_model, tmp_path_factory.mktemp("moves")) as running:
        running.start_worker(*MOVING)
        running.start_scheduler()
        running.start_gateway()
        running.wait_until_ready()
        yield running


@pytest.fixture(scope="module")
def calm(product: MovingProduct) -> list[History]:
    return Streams(product, NUM_TOKENS).run()


def until_second_is_ready(product: MovingProduct) -> None:
    product.start_second()
    product.until_ready_at(product.worker_port, product.second_port)


def restore(product: MovingProduct) -> None:
    """The first worker serves alone again."""
    product.start_worker(*MOVING)
    product.until_ready_at(product.worker_port, product.second_port)
    assert product.end("second") == 0
    product.until_ready_at(product.worker_port)


def test_a_worker_that_ends_gives_its_streams_away_with_their_kv(
    product: MovingProduct, calm: list[History]
) -> None:
    """Greedy, seeded, with penalties, with log probabilities: forty streams go on elsewhere."""
    codes, computed = list[int](), list[float]()
    until_second_is_ready(product)

    def replace(streams: Streams) -> None:
        assert streams.wait_until_all_go_on()
        computed.append(product.counted("prefill_tokens_total"))
        codes.append(product.end("worker_svc"))

    seen = Streams(product, NUM_TOKENS).run(replace)
    computed.append(product.counted("prefill_tokens_total"))
    assert codes == [0]
    assert_unnoticed(seen, calm)
    log = product.read_log("scheduler_svc")
    assert "running requests move with their KV" in log, log[-4000:]
    assert product.counted("pulled_blocks_total") > 0
    assert product.counted("not_pulled_blocks_total") == 0
    # The token after the newest is computed as ever; it counts where a request enters a slot.
    assert computed[1] - computed[0] <= len(seen), "prompts were computed again"
    restore(product)


@pytest.mark.parametrize("killed", ["worker_svc", "second"])
def test_a_worker_that_is_killed_while_streams_move_costs_no_token(
    product: MovingProduct, calm: list[History], killed: str
) -> None:
    """The source, or the receiver, as soon as the first request has left."""

    until_second_is_ready(product)

    def disturb(streams: Streams) -> None:
        assert streams.wait_until_all_go_on()
        before, first = product.counted("migrated_out_total"), product.processes["worker_svc"]
        first.send_signal(signal.SIGTERM)
        end_s = time.monotonic() + patience(30)
        while product.counted("migrated_out_total") == before:
            assert time.monotonic() < end_s
        product.processes[killed].kill()
        product.processes.pop(killed).wait(patience(30))
        if killed == "second":
            product.start_second()
            product.until_ready_at_least(product.second_port)
            product.processes.pop("worker_svc").wait(patience(90))

    seen = Streams(product, NUM_TOKENS).run(disturb)
    assert_unnoticed(seen, calm)
    product.until_ready_at(product.second_port)
    restore(product)
