"""The services of pagewire.LLM, fakes here: they end with the program, in whatever way it ends."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import pagewire
from tests.pace import patience
from tests.pagewire.alive import assert_gone, is_alive
from tests.pagewire.launcher.fake_services import write_checkout

NAMES = ("worker", "scheduler", "gateway")
# Both write a line at once: pieces of lines of two processes would mix.
PROGRAM = """
import os, sys, time
import pagewire
llm = pagewire.LLM(checkout=sys.argv[1])
{more}
os.write(1, b"ready\\n")
time.sleep(600)
"""
FORK = """
if os.fork() == 0:
    os.write(1, b"forked %d\\n" % os.getpid())
    time.sleep(600)
"""


def notes(checkout: Path) -> dict[str, dict]:
    return {name: json.loads((checkout / f"{name}.json").read_text()) for name in NAMES}


def pids(checkout: Path) -> list[int]:
    return [pid for note in notes(checkout).values() for pid in note["pids"]]


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_checkout(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # for logs
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    return tmp_path


@pytest.fixture
def program(checkout: Path) -> Iterator[list[subprocess.Popen]]:
    """A place for started programs, which end with the test."""
    started: list[subprocess.Popen] = []
    yield started
    for one in started:
        one.kill()
        one.wait()
        assert one.stdout is not None
        one.stdout.close()  # a fork that lives on may keep its end open


def start(program: list[subprocess.Popen], checkout: Path, more: str = "") -> subprocess.Popen:
    words = [sys.executable, "-c", PROGRAM.format(more=more), str(checkout)]
    program.append(subprocess.Popen(words, stdout=subprocess.PIPE, text=True))
    return program[-1]


def test_services_end_with_the_block_and_leave_no_logs(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PORT", "UP_GRPC_PORT", "TLS", "ONCE", "GATEWAY_API_KEY", "API_KEY"):
        monkeypatch.setenv(f"PAGEWIRE_{name}", "1")
    with pagewire.LLM(checkout=checkout, dtype="float32", gather_ms=0) as llm:
        given = notes(checkout)
        assert given["worker"]["arguments"]["--dtype"] == "float32"
        assert given["gateway"]["arguments"]["--gather-ms"] == "0"
        assert given["gateway"]["arguments"]["--host"] == "127.0.0.1"
        assert "--tls-cert" not in given["gateway"]["arguments"]
        key = given["gateway"]["environ"]["PAGEWIRE_GATEWAY_API_KEY"]
        assert len(key) > 40  # its own, since every user of this machine can reach its ports
        assert llm.client.stream("Where?").completion().text == "The capital of Japan is Tokyo."
        with pytest.raises(pagewire.Unauthenticated):
            pagewire.Client(f"127.0.0.1:{given['gateway']['arguments']['--grpc-port']}").tokenize(
                "a"
            )
        running = pids(checkout)
        assert all(map(is_alive, running))
    assert_gone(running, within_s=patience(0.5))  # it waited for them
    llm.close()
    assert not list(checkout.glob("pagewire-llm-*"))


def test_services_end_with_the_last_reference(checkout: Path) -> None:
    llm = pagewire.LLM(checkout=checkout)
    running = pids(checkout)
    del llm
    assert_gone(running, within_s=patience(0.5))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("more", ["", FORK], ids=["alone", "with a fork that lives on"])
def test_services_end_with_a_program_that_is_killed(
    checkout: Path, program: list[subprocess.Popen], number: int, more: str
) -> None:
    """A worker that lives on would keep its GPU's memory."""
    run = start(program, checkout, more)
    assert run.stdout is not None
    said = [run.stdout.readline() for _ in range(2 if more else 1)]
    assert "ready\n" in said
    forks = [int(line.split()[1]) for line in said if line.startswith("forked")]
    try:
        run.send_signal(number)
        run.wait(patience(10))
        assert_gone(pids(checkout))
        assert all(map(is_alive, forks))
    finally:
        for pid in forks:
            os.kill(pid, signal.SIGKILL)


def test_a_fork_that_ends_leaves_the_services(
    checkout: Path, program: list[subprocess.Popen]
) -> None:
    run = start(program, checkout, "if os.fork() == 0: sys.exit()\nos.wait()")
    assert run.stdout is not None
    assert run.stdout.readline() == "ready\n"
    assert all(map(is_alive, pids(checkout)))
    assert list(checkout.glob("pagewire-llm-*"))


def test_what_keeps_it_from_starting_is_raised_and_its_logs_stay(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE", "worker=die")
    with pytest.raises(pagewire.FailedPrecondition, match="out of memory, for example"):
        pagewire.LLM(checkout=checkout)
    assert_gone(pids_begun(checkout))
    (logs,) = checkout.glob("pagewire-llm-*")
    assert "the worker speaks" in (logs / "worker.log").read_text()


def pids_begun(checkout: Path) -> list[int]:
    return [p for f in checkout.glob("*.json") for p in json.loads(f.read_text())["pids"]]


@pytest.mark.usefixtures("checkout")
def test_a_model_that_is_not_there_is_named() -> None:
    with pytest.raises(pagewire.FailedPrecondition, match="/there is none"):
        pagewire.LLM("/there is none")


@pytest.mark.usefixtures("checkout")
def test_an_option_with_a_wrong_value_is_named() -> None:
    with pytest.raises(pagewire.FailedPrecondition, match="--max-model-len: invalid int"):
        pagewire.LLM(max_model_len="many")
