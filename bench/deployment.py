"""Runs a scheduler and a worker as processes of this machine, and reads their counters."""

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from bench.product import ROOT, free_ports
from pagewire.v1 import (
    debug_pb2,
    debug_pb2_grpc,
    scheduler_pb2,
    scheduler_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)

START_TIMEOUT_S = 240.0
STOP_TIMEOUT_S = 10.0
ASK_TIMEOUT_S = 5.0
MOST_STEPS = 1_000_000


@dataclass(frozen=True, slots=True)
class Deployment:
    """Addresses and process ids."""

    scheduler: str  # address
    worker: str
    pids: dict[str, int]  # of "scheduler" and "worker"
    worker_log: Path

    def describe(self) -> worker_pb2.DescribeResponse:
        """The worker's description; its decode_time is of its device."""
        with grpc.insecure_channel(self.worker) as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            return stub.Describe(worker_pb2.DescribeRequest(), timeout=ASK_TIMEOUT_S)

    def last_steps(self) -> list[debug_pb2.StepSummary]:
        """The last steps that the worker keeps, newest first."""
        unlimited = [("grpc.max_receive_message_length", -1)]
        with grpc.insecure_channel(self.worker, unlimited) as channel:
            stub = debug_pb2_grpc.DebugServiceStub(channel)
            request = debug_pb2.ListStepsRequest(limit=MOST_STEPS)
            return list(stub.ListSteps(request, timeout=ASK_TIMEOUT_S).steps)

    def forget_prefixes(self) -> None:
        """Empties the prefix cache, so that the same prompts are computed again."""
        with grpc.insecure_channel(self.scheduler) as channel:
            stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
            stub.ResetPrefixCache(scheduler_pb2.ResetPrefixCacheRequest(), timeout=ASK_TIMEOUT_S)

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds per process, including its children; "client" is this process."""
        parents = dict(_parents())
        used = {name: _tree_cpu_s(pid, parents) for name, pid in self.pids.items()}
        return used | {"client": time.process_time()}


@contextlib.contextmanager
def serving(
    model: Path, worker_options: Sequence[str], scheduler_options: Sequence[str]
) -> Iterator[Deployment]:
    """A ready worker and scheduler for the model, stopped after the block."""
    ports = free_ports()
    scheduler, worker = (f"127.0.0.1:{port}" for port in (ports.scheduler, ports.worker))
    commands = {
        "worker": [
            *("worker_svc", "--model", str(model), "--port", str(ports.worker)),
            *worker_options,
        ],
        "scheduler": [
            *("scheduler_svc", "--worker", worker, "--port", str(ports.scheduler)),
            *scheduler_options,
        ],
    }
    with (
        tempfile.TemporaryDirectory(prefix="pagewire-bench-") as logs,
        contextlib.ExitStack() as on,
    ):
        children, pids = [], {}
        for name, command in commands.items():
            path = Path(logs) / name
            log = on.enter_context(path.open("wb"))
            child = subprocess.Popen(
                [sys.executable, "-m", *command], cwd=ROOT, stdout=log, stderr=log
            )
            on.callback(stop, child)
            children.append((child, path))
            pids[name] = child.pid
        wait_until_ready(scheduler, children)
        yield Deployment(scheduler, worker, pids, Path(logs) / "worker")


def stop(child: "subprocess.Popen[bytes]") -> None:
    """Stops a process, by force if it does not end, and waits for it."""
    child.terminate()
    try:
        child.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def wait_until_ready(
    address: str, children: Sequence[tuple["subprocess.Popen[bytes]", Path]]
) -> None:
    """Waits until the scheduler has attached to its worker. Raises RuntimeError if a child ends."""
    deadline_s = time.monotonic() + START_TIMEOUT_S
    with grpc.insecure_channel(address) as channel:
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        while time.monotonic() < deadline_s:
            for child, log in children:
                if child.poll() is not None:
                    raise RuntimeError(f"{log.name} ended:\n{log.read_text(errors='replace')}")
            with contextlib.suppress(grpc.RpcError):
                if stub.GetStatus(scheduler_pb2.GetStatusRequest(), timeout=ASK_TIMEOUT_S).ready:
                    return
            time.sleep(0.2)
    raise RuntimeError(f"nothing is served after {START_TIMEOUT_S:.0f} s")


def _tree_cpu_s(root: int, parents: dict[int, int]) -> float:
    """CPU seconds of a process, of its reaped children, and of its running ones."""
    try:
        ticks = sum(map(int, _stat(root)[11:15]))  # utime, stime, and both of reaped children
    except OSError:  # it has just ended
        return 0.0
    own = ticks / os.sysconf("SC_CLK_TCK")
    return own + sum(_tree_cpu_s(pid, parents) for pid, parent in parents.items() if parent == root)


def _parents() -> Iterator[tuple[int, int]]:
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                yield int(folder.name), int(_stat(int(folder.name))[1])


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the name, first the state; a name may hold anything."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
