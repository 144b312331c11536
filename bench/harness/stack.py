"""The services as processes of their own that may die: who died is told, and started again.

`pagewire up` ends or restarts what has died; here a death must be seen.
"""

import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from bench.harness import checkpoints
from bench.harness.services import ROOT, START_TIMEOUT_S, Ports, ProductFailed
from default_model.folder import ensure
from pagewire.cli.launcher import services

LOG_TAIL = 2000
STOP_TIMEOUT_S = 20.0
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


@dataclass(frozen=True, slots=True)
class Death:
    """A process that ended by itself."""

    service: str
    status: int
    log_tail: str


@contextmanager
def tiny_chat_model() -> Iterator[Path]:
    """Random weights with the default model's tokenizer and chat template."""
    with checkpoints.temporary("tiny-chat") as folder:
        for name in TOKENIZER_FILES:
            shutil.copy(ensure() / name, folder)
        yield folder


@dataclass(slots=True)
class Stack:
    """Worker, scheduler and gateway of one model, on their ports."""

    ports: Ports
    specs: tuple[services.ServiceSpec, ...]
    logs: Path
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def http(self) -> tuple[str, int]:
        """The address at which the gateway serves HTTP."""
        return services.LOOPBACK, self.ports.gateway_http

    def address(self, name: str) -> str:
        """The gRPC address of a service."""
        return next(spec.address for spec in self.specs if spec.name == name)

    def pid(self, name: str) -> int:
        """The process of a service."""
        return self.running[name].pid

    def start(self) -> None:
        """Starts what does not run and waits until the gateway is ready. Raises ProductFailed."""
        for spec in self.specs:
            if spec.name not in self.running:
                with (self.logs / f"{spec.name}.log").open("ab") as log:
                    self.running[spec.name] = subprocess.Popen(
                        [sys.executable, "-m", spec.module, *spec.arguments],
                        cwd=ROOT,
                        stdout=log,
                        stderr=log,
                    )
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not self.is_ready():
            if time.monotonic() > deadline_s or self.has_death():
                raise ProductFailed(f"not ready: {[self.log_tail(s.name) for s in self.specs]}")
            time.sleep(0.1)

    def is_ready(self) -> bool:
        """True if the gateway can serve."""
        with suppress(OSError):
            host, port = self.http
            with urllib.request.urlopen(f"http://{host}:{port}/ready", timeout=5):
                return True
        return False

    def answers(self, within_s: float = 60.0) -> bool:
        """True if the gateway is ready, or becomes it."""
        deadline_s = time.monotonic() + within_s
        while not self.is_ready():
            if time.monotonic() > deadline_s:
                return False
            time.sleep(0.5)
        return True

    def has_death(self) -> bool:
        """True if a process has ended."""
        return any(process.poll() is not None for process in self.running.values())

    def take_deaths(self) -> list[Death]:
        """The processes that ended since the last call; start() starts them again."""
        ended = {name: p for name, p in self.running.items() if p.poll() is not None}
        for name in ended:
            del self.running[name]
        return [Death(name, p.returncode, self.log_tail(name)) for name, p in ended.items()]

    def renew(self) -> list[Death]:
        """Ends everything and starts it again; the gateway counts as dead."""
        hung = Death("gateway", 0, self.log_tail("gateway"))
        self.stop()
        self.start()
        return [hung]

    def log_tail(self, name: str) -> str:
        """The end of a service's log."""
        path = self.logs / f"{name}.log"
        return path.read_text(errors="replace")[-LOG_TAIL:] if path.exists() else ""

    def stop(self) -> None:
        """Ends all processes, the gateway first."""
        for name in reversed(list(self.running)):
            process = self.running.pop(name)
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextmanager
def started(
    specs: Sequence[services.ServiceSpec], ports: Ports, logs: Path | None = None
) -> Iterator[Stack]:
    """Services that are ready, ended after the block."""
    with tempfile.TemporaryDirectory(prefix="pagewire-stack-") as scratch:
        stack = Stack(ports, tuple(specs), logs or Path(scratch))
        try:
            stack.start()
            yield stack
        finally:
            stack.stop()
