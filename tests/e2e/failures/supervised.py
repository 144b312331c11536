"""`pagewire up` as a process, and the processes of its services."""

import contextlib
import http.client
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from bench.harness.services import ROOT, ProductFailed, free_ports
from pagewire._channel import Connection
from pagewire.cli import health
from pagewire.cli.launcher.services import MODULES

START_S = 240.0
STOP_S = 120.0
_POLL_S = 0.1  # each poll costs the processor some ms, and what starts needs it
_PROBE_S = 1.0
SERVICES = ("gateway", "scheduler", "worker")
_MODULE_OF = {"worker": MODULES[0], "scheduler": MODULES[1], "gateway": MODULES[2]}


class Supervised:
    """The product under `pagewire up`, ready; stopped by SIGTERM after the block."""

    def __init__(self, model: Path, options: Sequence[str]) -> None:
        self.ports = free_ports()
        self._logs = tempfile.TemporaryDirectory(prefix="pagewire-tests-")
        self.said = Path(self._logs.name) / "up.log"
        ports = {
            "--http-port": self.ports.gateway_http,
            "--grpc-port": self.ports.gateway_grpc,
            "--scheduler-port": self.ports.scheduler,
            "--worker-port": self.ports.worker,
        }
        with self.said.open("wb") as said:
            self._up = subprocess.Popen(
                [
                    *(sys.executable, "-m", "pagewire", "up", "--no-sample"),
                    *("--model", str(model), "--log-dir", self._logs.name),
                    *(word for pair in ports.items() for word in map(str, pair)),
                    *options,
                ],
                cwd=ROOT,
                stdout=said,
                stderr=subprocess.STDOUT,
            )

    @property
    def up(self) -> "subprocess.Popen[bytes]":
        """The process of `pagewire up`."""
        return self._up

    def pid(self, service: str) -> int | None:
        """The service's process; None while there is none."""
        for guard in _children(self._up.pid):
            for pid in _children(guard):
                words = _command(pid)
                if "-m" in words and words[words.index("-m") + 1] == _MODULE_OF[service]:
                    return pid
        return None

    def is_ready(self) -> bool:
        """True if the gateway says so."""
        opened = http.client.HTTPConnection("127.0.0.1", self.ports.gateway_http, timeout=_PROBE_S)
        try:
            with contextlib.closing(opened) as connection:
                connection.request("GET", "/ready")
                with connection.getresponse() as response:
                    return response.status == http.HTTPStatus.OK
        except (OSError, http.client.HTTPException):
            return False

    def is_whole(self) -> bool:
        """True if the gateway and each service by itself are ready."""
        ports = (self.ports.worker, self.ports.scheduler, self.ports.gateway_grpc)
        return self.is_ready() and all(
            health.check(Connection(f"127.0.0.1:{port}"), _PROBE_S).is_serving for port in ports
        )

    def wait_until_whole(self) -> None:
        """Waits for all services. Raises ProductFailed."""
        deadline_s = time.monotonic() + START_S
        while not self.is_whole():
            if self._up.poll() is not None or time.monotonic() > deadline_s:
                raise ProductFailed(f"the product is not ready:\n{self.said.read_text()[-4000:]}")
            time.sleep(_POLL_S)

    def stop(self) -> int:
        """Stops everything by SIGTERM; returns the exit status."""
        self._up.terminate()
        return self._up.wait(STOP_S)

    def __enter__(self) -> Self:
        self.wait_until_whole()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._up.poll() is None:
            self._up.terminate()
        try:
            self._up.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._up.kill()
            self._up.wait()
        self._logs.cleanup()


class ReadyWatch(threading.Thread):
    """Notes when the gateway was last seen not ready."""

    def __init__(self, product: Supervised) -> None:
        super().__init__(daemon=True)
        self._product = product
        self._over = threading.Event()
        self._began_s = time.monotonic()
        self.down_s = 0.0  # from the beginning until it was ready for good

    def run(self) -> None:
        """Asks until it is stopped."""
        while not self._over.is_set():
            if not self._product.is_ready():
                self.down_s = time.monotonic() - self._began_s
            time.sleep(_POLL_S)

    def stop(self) -> float:
        """Returns the seconds after which it was ready for good; 0 if it always was."""
        self._over.set()
        self.join()
        return self.down_s


def _children(pid: int) -> list[int]:
    try:
        listed = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:
        return []
    return [int(child) for child in listed.split()]


def _command(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    except OSError:
        return []
