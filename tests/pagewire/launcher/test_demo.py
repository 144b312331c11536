"""`pagewire up --demo`: what the page writes into the pipe kills the worker, which comes back."""

import os
import time
from pathlib import Path

import pytest

from pagewire.cli.launcher.demo import KILL_WORKER, DemoPipe
from tests.pace import patience


def test_the_pipe_is_for_its_user_alone_and_many_kills_are_one(tmp_path: Path) -> None:
    path = tmp_path / "demo.pipe"
    path.write_text("of an earlier run")
    with DemoPipe(path) as pipe:
        assert path.is_fifo() and path.stat().st_mode & 0o777 == 0o600
        assert not pipe.asks_for_kill()
        for _ in range(3):
            end = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
            os.write(end, KILL_WORKER)
            os.close(end)
        assert pipe.asks_for_kill()
        assert not pipe.asks_for_kill()
    assert not path.exists()


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.1", "::"])
def test_where_others_could_kill_the_worker_there_is_no_demo(host, up) -> None:
    status, _, err = up.finish("--once", "--demo", "--host", host)
    assert status == 1
    assert "--demo: on --host" in err


def test_a_worker_that_the_page_kills_is_started_again(up) -> None:
    run = up.start("--demo")
    up.wait_for(run, "Ready.")
    pipe = up.folder / "logs" / "demo.pipe"
    assert up.note("gateway")["arguments"]["--demo"] == str(pipe)
    before = up.note("worker")["pids"][0]
    end = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
    os.write(end, KILL_WORKER)
    os.close(end)
    deadline_s = time.monotonic() + patience(30)
    while up.note("worker")["pids"][0] == before and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert up.note("worker")["pids"][0] != before
