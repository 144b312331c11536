"""A download that ended early goes on where it stopped, in the same process and in the next."""

import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.pace import patience
from tests.pagewire.hub.conftest import ROOT, Run
from tests.pagewire.hub.stand_in import Hub, Repository

FILE = "model.safetensors"
WEIGHTS = random.Random(0).randbytes(3 << 20)
FILES = {"config.json": b"{}", "tokenizer.json": b"{}", FILE: WEIGHTS}
COMMAND = ("-m", "pagewire.hub", "org/one")


def starts(hub: Hub) -> list[int]:
    """The byte at which each answer with the weights began."""
    return [int(part.removeprefix("bytes=").rstrip("-") or 0) for part in hub.gets(FILE)]


def test_a_cut_connection_is_taken_up_where_it_was_cut(hub: Hub, run: Run) -> None:
    hub.repositories["org/one"] = Repository({"main": FILES})
    hub.cuts[FILE] = [1_000_000, 500_000]
    done = run(*COMMAND)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert (Path(done.stdout.strip()) / FILE).read_bytes() == WEIGHTS
    assert starts(hub) == [0, 1_000_000, 1_500_000]


def test_a_killed_download_goes_on_in_the_next_process(
    hub: Hub, run: Run, environ: dict[str, str]
) -> None:
    hub.repositories["org/one"] = Repository({"main": FILES})
    hub.stalls[FILE] = 2_000_000
    first = subprocess.Popen([sys.executable, *COMMAND], env=environ, cwd=ROOT)
    try:
        part = until(lambda: next(Path(environ["HF_HOME"]).glob("hub/*/blobs/*.pagewire"), None))
        until(lambda: part.stat().st_size >= 1_000_000)
    finally:
        first.send_signal(signal.SIGKILL)
        first.wait()
    hub.stalls.clear()
    held = part.stat().st_size
    done = run(*COMMAND)
    assert (Path(done.stdout.strip()) / FILE).read_bytes() == WEIGHTS
    assert starts(hub) == [0, held]
    assert list(part.parent.glob("*.pagewire")) == []


def test_a_part_that_was_damaged_is_fetched_anew(
    hub: Hub, run: Run, environ: dict[str, str]
) -> None:
    hub.repositories["org/one"] = Repository({"main": FILES})
    hub.cuts[FILE] = [1_000_000] + [0] * 20
    done = run(*COMMAND)
    assert done.returncode == 1
    assert f"org/one cannot be read from {hub.url}: " in done.stdout
    hub.cuts.clear()
    hub.asked.clear()
    damaged = next(Path(environ["HF_HOME"]).glob("hub/*/blobs/*.pagewire"))
    with damaged.open("r+b") as file:
        file.write(b"xxxx")
    done = run(*COMMAND)
    assert (Path(done.stdout.strip()) / FILE).read_bytes() == WEIGHTS
    assert starts(hub) == [1_000_000, 0]


def until(find: Callable[[], Any]) -> Any:
    """The answer of `find` once it has one."""
    deadline_s = time.monotonic() + patience(10)
    while time.monotonic() < deadline_s:
        if found := find():
            return found
        time.sleep(0.02)
    raise AssertionError("it never came")
