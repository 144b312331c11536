"""Starts and stops the three services on free ports of this machine, for the benchmarks."""

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from pagewire.v1 import inference_pb2, inference_pb2_grpc

ROOT = Path(__file__).parents[1]
ARCHIVED_COMMIT = ROOT / "bench" / "archived_commit.txt"
START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 15.0


class ProductFailed(RuntimeError):
    """Raised when a service ended or did not start; the message has the end of its log."""


@dataclass(frozen=True, slots=True)
class Ports:
    """The ports of the services."""

    worker: int
    scheduler: int
    gateway_http: int
    gateway_grpc: int


def free_ports() -> Ports:
    """Four ports that are free now."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(4)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return Ports(*(one.getsockname()[1] for one in sockets))


def commands(model: Path, ports: Ports, worker_options: Sequence[str]) -> dict[str, list[str]]:
    """The command line of each service."""
    return {
        "worker_svc": ["--model", str(model), "--port", str(ports.worker), *worker_options],
        "scheduler_svc": [
            *("--worker", f"127.0.0.1:{ports.worker}"),
            *("--port", str(ports.scheduler)),
        ],
        "gateway": [
            *("--model", str(model)),
            *("--scheduler", f"127.0.0.1:{ports.scheduler}"),
            *("--http-port", str(ports.gateway_http)),
            *("--grpc-port", str(ports.gateway_grpc)),
        ],
    }


@contextlib.contextmanager
def running(model: Path, worker_options: Sequence[str] = ()) -> Iterator[str]:
    """Starts the three services, waits until they serve, yields the gateway's gRPC address."""
    ports = free_ports()
    address = f"127.0.0.1:{ports.gateway_grpc}"
    with tempfile.TemporaryDirectory(prefix="pagewire-bench-") as logs:
        children: dict[str, subprocess.Popen[bytes]] = {}
        try:
            for module, options in commands(model, ports, worker_options).items():
                with (Path(logs) / module).open("wb") as log:
                    children[module] = subprocess.Popen(
                        [sys.executable, "-m", module, *options],
                        cwd=ROOT,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
            _wait_until_served(address, children, Path(logs))
            yield address
        finally:
            _stop(list(children.values()))


def _wait_until_served(
    address: str, children: dict[str, "subprocess.Popen[bytes]"], logs: Path
) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    with grpc.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        while True:
            for module, child in children.items():
                if child.poll() is not None:
                    raise ProductFailed(f"{module} ended:\n{_tail(logs / module)}")
            with contextlib.suppress(grpc.RpcError):
                if stub.ListModels(inference_pb2.ListModelsRequest(), timeout=5).models:
                    return
            if time.monotonic() > deadline_s:
                ends = "\n".join(f"{module}:\n{_tail(logs / module)}" for module in children)
                raise ProductFailed(f"no model is served after {START_TIMEOUT_S:.0f} s\n{ends}")
            time.sleep(0.2)


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-20:])


def _stop(children: Sequence["subprocess.Popen[bytes]"]) -> None:
    for child in reversed(children):  # the gateway first, so that no new requests arrive
        child.terminate()
    deadline_s = time.monotonic() + STOP_TIMEOUT_S
    for child in children:
        try:
            child.wait(max(0.1, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def hardware() -> str:
    """The processor, its cores and its memory, as text."""
    model = "unknown processor"
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(
            (x.split(":", 1)[1].strip() for x in lines if x.startswith("model name")), model
        )
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{model}, {os.cpu_count()} cores, {memory_gib:.0f} GiB"


def commit() -> str:
    """The commit of this tree, with a plus if it has been changed.

    An archive of a commit has it in a file written by git; other copies are unknown.
    """
    if not (ROOT / ".git").exists():
        written = ARCHIVED_COMMIT.read_text().strip()
        return "unknown" if written.startswith("$") else written
    try:
        changed = "+" if _git("status", "--porcelain") else ""
        return _git("rev-parse", "--short=12", "HEAD") + changed
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def _git(*arguments: str) -> str:
    ran = subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=30, check=True
    )
    return ran.stdout.strip()
