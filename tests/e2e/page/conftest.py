"""`pagewire up --demo` with a tiny model, and a browser; skipped by name where there is none."""

import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.conftest import ROOT, environment_of_users
from tests.e2e.page.browser import Tab, browsing, find_browser
from tests.pace import patience
from tests.ports import free_port


@dataclass(frozen=True, slots=True)
class Demo:
    """A running demo."""

    url: str
    process: "subprocess.Popen[bytes]"
    log: Path


@pytest.fixture(scope="session")
def program() -> str:
    found = find_browser()
    if found is None:
        pytest.skip("Chromium is not installed")
    return found


@pytest.fixture(scope="module")
def demo(
    program: str, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Demo]:
    folder = tmp_path_factory.mktemp("demo")
    ports = [free_port() for _ in range(4)]
    names = ("--http-port", "--grpc-port", "--scheduler-port", "--worker-port")
    where = [word for name, port in zip(names, ports, strict=True) for word in (name, str(port))]
    small = ("--kv-cache-gib", "0.02", "--threads", "1", "--max-num-seqs", "8")
    log = folder / "up.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "pagewire", "up", "--demo", "--no-sample"),
                *("--model", str(tiny_model), "--log-dir", str(folder), "--dtype", "float32"),
                *(*where, *small, "--gateway-options=--processes 1"),
                "--scheduler-options=--cache-policy sessions",
            ],
            cwd=ROOT,
            stdout=output,
            stderr=output,
            env=environment_of_users(XDG_STATE_HOME=str(folder)),
        )
    try:
        url = f"http://127.0.0.1:{ports[0]}/"
        _wait(process, f"{url}ready", log)
        yield Demo(url, process, log)
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGTERM)
        assert process.wait(patience(60)) == 0
        assert not (folder / "demo.pipe").exists()
    finally:
        process.kill()
        process.wait()


def _wait(process: "subprocess.Popen[bytes]", url: str, log: Path) -> None:
    deadline_s = time.monotonic() + patience(180)
    while time.monotonic() < deadline_s:
        assert process.poll() is None, log.read_text()
        with suppress(OSError), urllib.request.urlopen(url, timeout=patience(5)):
            return
        time.sleep(0.2)
    raise AssertionError(log.read_text())


@pytest.fixture
def tab(program: str, demo: Demo) -> Iterator[Tab]:
    """A fresh browser at the page; what it asked for and complained of is judged at the end."""
    with browsing(program, patience(20)) as opened:
        opened.resize(1440, 900)
        opened.prefer("light")
        opened.open(demo.url)
        opened.until("document.querySelector('#lamp.good')")
        yield opened
        strangers = [url for url in opened.requested() if not url.startswith(demo.url)]
        assert strangers == []
        assert opened.problems() == []


@pytest.fixture(scope="session")
def axe() -> str:
    """The source of axe-core, which `make axe` fetches."""
    path = Path(sys.prefix) / "axe" / "node_modules" / "axe-core" / "axe.min.js"
    if not path.is_file():
        pytest.skip("axe-core is not installed: `make axe`")
    return path.read_text()
