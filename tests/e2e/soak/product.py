"""`pagewire up` as a process, its services as the process table shows them, and their memory."""

import os
import random
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import grpc

from bench.harness.services import ROOT, START_TIMEOUT_S, Ports, ProductFailed, free_ports
from pagewire._connection.peer_token import found_token
from pagewire.v1 import scheduler_pb2, scheduler_pb2_grpc
from tests.pace import patience

MODULES = {"worker": "worker_svc", "scheduler": "scheduler_svc", "gateway": "gateway"}
ASK_TIMEOUT_S = patience(2.5)
STOP_TIMEOUT_S = patience(15)
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class SoakedProduct:
    """A running product."""

    ports: Ports
    process: subprocess.Popen[bytes]
    log: Path

    def pids(self) -> dict[str, int]:
        """The processes that serve, by service; a service that is down is missing."""
        found: dict[str, int] = {}
        for pid in _descendants(self.process.pid):
            with suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
                for name, module in MODULES.items():
                    if words[1:4] == ["-u", "-m", module]:
                        found.setdefault(name, pid)  # the oldest: it may have children
        return found

    def rss_mib(self) -> dict[str, float]:
        """Resident memory of each service."""
        page = os.sysconf("SC_PAGE_SIZE")
        sizes = {}
        for name, pid in self.pids().items():
            with suppress(OSError):
                sizes[name] = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * page / MIB
        return sizes

    def kill(self, name: str) -> None:
        """Kills a service, which the product must start again."""
        pid = self.pids().get(name)
        if pid is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def is_ready(self) -> bool:
        """True if the gateway can serve."""
        with suppress(OSError):
            url = f"http://127.0.0.1:{self.ports.gateway_http}/ready"
            with urllib.request.urlopen(url, timeout=ASK_TIMEOUT_S):
                return True
        return False

    def wait_until_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Raises ProductFailed, with the end of the log, when it ends or takes too long."""
        deadline_s = time.monotonic() + timeout_s
        while not self.is_ready():
            if self.process.poll() is not None or time.monotonic() > deadline_s:
                tail = self.log.read_text(errors="replace")[-2000:]
                raise ProductFailed(f"not ready (status {self.process.poll()}): {tail}")
            time.sleep(0.2)

    def status(self) -> scheduler_pb2.GetStatusResponse:
        """The scheduler's counters."""
        with grpc.insecure_channel(f"127.0.0.1:{self.ports.scheduler}") as channel:
            stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
            token = found_token(f"127.0.0.1:{self.ports.scheduler}")
            metadata = (("authorization", f"Bearer {token}"),) if token else ()
            request = scheduler_pb2.GetStatusRequest()
            return stub.GetStatus(request, timeout=ASK_TIMEOUT_S, metadata=metadata)


@contextmanager
def running(model: Path, logs: Path, options: Sequence[str]) -> Iterator[SoakedProduct]:
    """The product, ready; stopped after the block."""
    ports = free_ports()
    command = [
        *(sys.executable, "-m", "pagewire", "up", "--no-sample", "--model", str(model)),
        *("--http-port", str(ports.gateway_http), "--grpc-port", str(ports.gateway_grpc)),
        *("--scheduler-port", str(ports.scheduler), "--worker-port", str(ports.worker)),
        *("--log-dir", str(logs), "--dtype", "float32", *options),
    ]
    path = logs / "up.log"
    with path.open("wb") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
    product = SoakedProduct(ports, process, path)
    try:
        product.wait_until_ready()
        yield product
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _descendants(root: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                children.setdefault(int(fields[1]), []).append(int(folder.name))
    found: list[int] = []
    left = [root]
    while left:
        left.extend(children.get(left.pop(), ()))
        found = sorted({*found, *left})
    return found


def draw_victim(rng: random.Random) -> str:
    """The service that is killed next."""
    return rng.choice(list(MODULES))
