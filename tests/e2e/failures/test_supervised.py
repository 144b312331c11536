"""`pagewire up` with clients: services die, hang and end under it, and no text is lost.

`python -m tests.e2e.failures.kill_matrix` does the same with more streams, more often.
"""

import json
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.failures.kill_matrix import Cell, Matrix
from tests.e2e.failures.supervised import Supervised
from tests.e2e.failures.twins import Streams, Verdict, asks
from tests.pace import paced, patience

pytestmark = pytest.mark.slow
# Of each kind one over HTTP and one through the SDK; more by hand.
NUM_STREAMS = int(os.environ.get("PAGEWIRE_KILL_STREAMS", "5"))
NUM_TOKENS = 50  # of slow steps: streams last, and the cores are free for what starts
OPTIONS = ("--device", "cpu", "--dtype", "float32", "--hang-timeout-s", str(paced(3.0)))
SMALL = ("--worker-options=--threads 1 --kv-cache-gib 0.2 --failpoint=slow@1:0.04",)


@pytest.fixture(scope="module")
def supervised(terse_model: Path) -> Iterator[Supervised]:
    with Supervised(terse_model, [*OPTIONS, *SMALL]) as product:
        yield product


@pytest.fixture(scope="module")
def matrix(supervised: Supervised) -> Matrix:
    seed = int(os.environ.get("PAGEWIRE_KILL_SEED") or random.SystemRandom().randrange(10**6))
    print(f"PAGEWIRE_KILL_SEED={seed}")
    return Matrix(supervised, asks(NUM_STREAMS, NUM_TOKENS), random.Random(seed))


@pytest.mark.parametrize(
    ("victim", "how"),
    [
        ("worker", "kill"),
        ("scheduler", "kill"),
        ("gateway", "kill"),
        ("worker", "stop"),
        ("scheduler", "stop"),
        ("gateway", "stop"),
        ("worker", "term"),
        ("scheduler", "term"),
        ("gateway", "term"),
    ],
)
def test_a_service_is_lost_and_no_stream_is(
    supervised: Supervised, matrix: Matrix, victim: str, how: str
) -> None:
    cell = Cell((victim,), how)
    matrix.round(cell)
    assert cell.num_lost == 0, cell.row()
    assert cell.verdicts[False][Verdict.SAME] == NUM_STREAMS
    if victim != "gateway" or how == "term":
        assert cell.verdicts[True][Verdict.SAME] == NUM_STREAMS
    assert_said_to_be_back(supervised, victim)


def assert_said_to_be_back(supervised: Supervised, victim: str) -> None:
    """The last line comes with the next health check."""
    deadline_s = time.monotonic() + patience(10)
    while ", is back after " not in (last := supervised.said.read_text().splitlines()[-1]):
        assert time.monotonic() < deadline_s, last
        time.sleep(0.05)
    assert last.startswith(f"the {victim} ")


def test_all_three_are_killed_at_once_and_no_stream_of_the_sdk_is_lost(matrix: Matrix) -> None:
    cell = Cell(("gateway", "scheduler", "worker"), "kill")
    matrix.round(cell)
    assert cell.num_lost == 0, cell.row()


def test_at_sigterm_all_streams_complete_new_ones_are_refused_and_the_status_is_0(
    supervised: Supervised, matrix: Matrix
) -> None:
    ports = supervised.ports
    streams = Streams(asks(NUM_STREAMS, NUM_TOKENS), ports.gateway_http, ports.gateway_grpc)
    streams.wait_until_all_have_begun()
    assert streams.num_running
    supervised.up.terminate()
    while supervised.is_ready():
        time.sleep(0.01)
    if streams.num_running:
        answer = httpx.get(f"http://127.0.0.1:{ports.gateway_http}/ready", timeout=patience(60))
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert set(matrix.judge(streams.wait())) == {Verdict.SAME}
    assert supervised.up.wait(patience(30)) == 0


def test_with_little_time_to_drain_the_rest_ends_with_an_error_event_and_done(
    terse_model: Path,
) -> None:
    with Supervised(terse_model, [*OPTIONS, *SMALL, "--drain-timeout-s", "1"]) as product:
        body = {"prompt": "Hello", "stream": True, "max_tokens": 2000, "ignore_eos": True}
        url = f"http://127.0.0.1:{product.ports.gateway_http}/v1/completions"
        with httpx.stream("POST", url, json=body, timeout=patience(60)) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: ")
            os.kill(product.pid("worker") or 0, signal.SIGSTOP)  # nothing can complete
            product.up.terminate()
            *_, error, done = [line for line in lines if line]
        assert done == "data: [DONE]"
        assert "shut down" in json.loads(error.removeprefix("data: "))["error"]["message"]
        assert product.up.wait(patience(40)) == 0
