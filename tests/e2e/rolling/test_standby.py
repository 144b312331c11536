"""Two schedulers for one worker: one is active, the other takes over, and no client can notice.

Real processes and a tiny model.
"""

import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import grpc
import pytest

from pagewire.v1 import scheduler_pb2, scheduler_pb2_grpc
from tests.e2e.conftest import SMALL, Product
from tests.e2e.history import History
from tests.e2e.streams import Streams, assert_unnoticed
from tests.pace import paced, patience
from tests.ports import free_port

pytestmark = pytest.mark.slow
NUM_TOKENS = 80
SHORT = (*SMALL, "--max-model-len", "1024")
FENCED_OUT = 3
NAMES = ("first", "second")


@dataclass(slots=True)
class Pair(Product):
    """A product with two schedulers."""

    ports: dict[str, int] = field(default_factory=lambda: {name: free_port() for name in NAMES})

    def start_one(self, name: str) -> None:
        delay_s = f"{paced(1.0):.2f}"
        options = ("--standby-delay-s", delay_s, "--drain-timeout-s", "0.2")
        settings = replace(
            self._settings, scheduler_port=self.ports[name], scheduler_options=options
        )
        self._start(settings, "scheduler_svc", name)

    def start_gateway(self) -> None:
        both = ",".join(f"127.0.0.1:{port}" for port in self.ports.values())
        options = ("--scheduler", both)  # after the one that `pagewire up` gives, so it counts
        self._start(replace(self._settings, gateway_options=options), "gateway")

    def ask(self, name: str) -> scheduler_pb2.GetStatusResponse | None:
        """A scheduler's status; None if it does not answer."""
        with grpc.insecure_channel(f"127.0.0.1:{self.ports[name]}") as channel:
            stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
            try:
                return stub.GetStatus(scheduler_pb2.GetStatusRequest(), timeout=patience(2))
            except grpc.RpcError:
                return None

    def until(self, holds: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + patience(90)
        while not holds():
            said = "".join(map(self.log_of, (*NAMES, "gateway")))
            assert time.monotonic() < deadline_s, said
            time.sleep(0.1)

    def is_active(self, name: str) -> bool:
        status = self.ask(name)
        return status is not None and status.ready

    def is_warm(self, name: str) -> bool:
        status = self.ask(name)
        return status is not None and status.stands_by and "another scheduler" in status.reason

    def settle(self) -> tuple[str, str]:
        """Starts what is not running; the names of the active one and of the one that stands by.

        Of two that take over at once one ends, and is started again, as by any supervisor.
        """

        def is_settled() -> bool:
            for name in NAMES:
                if name not in self.processes or self.processes[name].poll() == FENCED_OUT:
                    self.start_one(name)
            return any(map(self.is_active, NAMES)) and any(map(self.is_warm, NAMES))

        self.until(is_settled)
        active = next(name for name in NAMES if self.is_active(name))
        self.wait_until_ready()
        return active, next(name for name in NAMES if name != active)

    def kill_one(self, name: str) -> None:
        process = self.processes.pop(name)
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def pair(terse_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    running = Pair(terse_model, tmp_path_factory.mktemp("standby"))
    try:
        running.start_worker(*SHORT)
        running.start_gateway()
        running.settle()
        yield running
    finally:
        for process in running.processes.values():
            process.send_signal(signal.SIGCONT)
        running.kill()


@pytest.fixture(scope="module")
def calm(pair: Pair) -> list[History]:
    return Streams(pair, NUM_TOKENS).run()


def disturbed(pair: Pair, disturb: Callable[[], None]) -> list[History]:
    """The words of streams that were running when something happened."""

    def at_some_time(streams: Streams) -> None:
        assert streams.wait_for_tokens(300)
        disturb()

    return Streams(pair, NUM_TOKENS).run(at_some_time)


def test_a_stopped_scheduler_steps_down_when_it_wakes_up(pair: Pair, calm: list[History]) -> None:
    active, other = pair.settle()
    stopped: list[subprocess.Popen[bytes]] = []

    def stop() -> None:
        stopped.append(pair.processes.pop(active))
        stopped[0].send_signal(signal.SIGSTOP)

    try:
        seen = disturbed(pair, stop)
        assert pair.is_active(other), "no other went on with the streams"
        epoch = _epoch(pair, other)
    finally:
        stopped[0].send_signal(signal.SIGCONT)
    assert stopped[0].wait(patience(60)) == FENCED_OUT
    assert "has taken the worker from epoch" in pair.read_log(active)
    assert_unnoticed(seen, calm)
    assert pair.is_active(other) and _epoch(pair, other) == epoch, "it took the worker back"


def test_a_killed_scheduler_is_followed_by_the_standby(pair: Pair, calm: list[History]) -> None:
    active, other = pair.settle()
    seen = disturbed(pair, lambda: pair.kill_one(active))
    assert_unnoticed(seen, calm)
    assert pair.is_active(other)


def test_a_standby_that_dies_is_not_missed(pair: Pair, calm: list[History]) -> None:
    active, other = pair.settle()
    epoch = _epoch(pair, active)
    seen = disturbed(pair, lambda: pair.kill_one(other))
    assert_unnoticed(seen, calm)
    assert pair.is_active(active) and _epoch(pair, active) == epoch
    assert pair.settle() == (active, other)


def test_a_scheduler_that_drains_is_followed_by_the_standby(
    pair: Pair, calm: list[History]
) -> None:
    active, other = pair.settle()
    codes = []

    def end() -> None:
        process = pair.processes.pop(active)
        process.send_signal(signal.SIGTERM)
        codes.append(process.wait(patience(60)))

    seen = disturbed(pair, end)
    assert codes == [0]
    assert_unnoticed(seen, calm)
    assert pair.is_active(other)


def test_both_die_and_come_back(pair: Pair, calm: list[History]) -> None:
    pair.settle()

    def kill_both() -> None:
        for name in NAMES:
            pair.kill_one(name)
        pair.settle()

    assert_unnoticed(disturbed(pair, kill_both), calm)


def _epoch(pair: Pair, name: str) -> int:
    status = pair.ask(name)
    assert status is not None
    return status.epoch
