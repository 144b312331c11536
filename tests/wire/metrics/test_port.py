"""The plaintext port: GET /metrics, nothing else, and no connection that holds it up."""

import asyncio
import http.client
import socket
from collections.abc import Iterable, Iterator
from contextlib import ExitStack

import pytest
from prometheus_client.core import GaugeMetricFamily, Metric

from tests.pace import patience
from wire.metrics.port import MAX_SCRAPES, MetricsPort, on_loop
from wire.server import PortInUse


def one_gauge() -> Iterable[Metric]:
    return [GaugeMetricFamily("x_running", "Running.", value=3)]


@pytest.fixture
def port() -> Iterator[MetricsPort]:
    made = MetricsPort(one_gauge, "127.0.0.1", 0)
    made.start()
    yield made
    made.stop()


def ask(port: int, method: str = "GET", path: str = "/metrics") -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=patience(10))
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def test_it_serves_metrics_and_nothing_else(port: MetricsPort) -> None:
    status, text = ask(port.port)
    assert (status, text.splitlines()[-1]) == (200, "x_running 3.0")
    assert ask(port.port, path="/")[0] == 404
    assert ask(port.port, "POST")[0] == 501
    assert ask(port.port, path="/metrics?x=1")[0] == 200


def test_callers_that_say_nothing_are_limited_in_number(port: MetricsPort) -> None:
    address = "127.0.0.1", port.port
    with ExitStack() as silent:
        for _ in range(MAX_SCRAPES):
            silent.enter_context(socket.create_connection(address))
        with socket.create_connection(address, timeout=patience(5)) as extra:
            assert extra.recv(1) == b"", "closed at once"


def test_a_port_in_use_is_named(port: MetricsPort) -> None:
    with pytest.raises(PortInUse, match=r"--metrics-port.*cannot listen on 127.0.0.1"):
        MetricsPort(one_gauge, "127.0.0.1", port.port)


def test_a_service_that_cannot_answer_is_a_503() -> None:
    def broken() -> Iterable[Metric]:
        raise RuntimeError("secret")

    port = MetricsPort(broken, "127.0.0.1", 0)
    port.start()
    status, text = ask(port.port)
    port.stop()
    assert status == 503
    assert "secret" not in text


async def test_what_belongs_to_the_loop_is_read_on_it() -> None:
    loop, seen = asyncio.get_running_loop(), []

    def collect() -> Iterable[Metric]:
        seen.append(asyncio.get_running_loop())
        return one_gauge()

    port = MetricsPort(on_loop(loop, collect), "127.0.0.1", 0)
    port.start()
    assert (await asyncio.to_thread(ask, port.port))[0] == 200
    await asyncio.to_thread(port.stop)
    assert seen == [loop]
