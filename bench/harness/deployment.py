"""Runs a scheduler and a worker as processes of this machine, and reads their counters."""

import contextlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from bench.harness.services import free_ports, launched, settings
from pagewire.cli.launcher.processes import Service, Services
from pagewire.cli.launcher.services import ServiceSpec, plan
from pagewire.v1 import (
    debug_pb2,
    debug_pb2_grpc,
    scheduler_pb2,
    scheduler_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)

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

    def status(self) -> scheduler_pb2.GetStatusResponse:
        """The scheduler's counters."""
        with grpc.insecure_channel(self.scheduler) as channel:
            stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
            return stub.GetStatus(scheduler_pb2.GetStatusRequest(), timeout=ASK_TIMEOUT_S)

    def last_steps(self) -> list[debug_pb2.StepSummary]:
        """The last steps that the worker keeps, newest first."""
        return _last_steps(self.worker)

    def last_answered_steps(self) -> list[debug_pb2.StepSummary]:
        """The last steps that the scheduler keeps, newest first: from sending to the result."""
        return _last_steps(self.scheduler)

    def forget_prefixes(self) -> None:
        """Empties the prefix cache, so that the same prompts are computed again."""
        with grpc.insecure_channel(self.scheduler) as channel:
            stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
            stub.ResetPrefixCache(scheduler_pb2.ResetPrefixCacheRequest(), timeout=ASK_TIMEOUT_S)

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds per process, including its children; "client" is this process."""
        return cpu_s_of(self.pids) | {"client": time.process_time()}


@contextlib.contextmanager
def serving(
    model: Path, worker_options: Sequence[str], scheduler_options: Sequence[str]
) -> Iterator[Deployment]:
    """A worker and a scheduler that serve the model, ready; ended after the block."""
    chosen = settings(free_ports(), worker_options, scheduler_options)
    worker, scheduler, _ = plan(chosen, model)
    with attached((worker, scheduler), scheduler.address) as services:
        pids = {name: services[name].guard_pid for name in ("worker", "scheduler")}
        yield Deployment(scheduler.address, worker.address, pids, services["worker"].log_path)


@contextlib.contextmanager
def attached(specs: Sequence[ServiceSpec], scheduler: str) -> Iterator[Services]:
    """Runs services until the block ends, from when the scheduler has attached to its worker."""
    with grpc.insecure_channel(scheduler) as channel:
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)

        def is_ready() -> bool:
            with contextlib.suppress(grpc.RpcError):
                request = scheduler_pb2.GetStatusRequest()
                return bool(stub.GetStatus(request, timeout=ASK_TIMEOUT_S).ready)
            return False

        with launched(specs, is_ready) as services:
            yield services


def _last_steps(address: str) -> list[debug_pb2.StepSummary]:
    unlimited = [("grpc.max_receive_message_length", -1)]
    with grpc.insecure_channel(address, unlimited) as channel:
        stub = debug_pb2_grpc.DebugServiceStub(channel)
        request = debug_pb2.ListStepsRequest(limit=MOST_STEPS)
        return list(stub.ListSteps(request, timeout=ASK_TIMEOUT_S).steps)


def own_pid(service: Service) -> int:
    """The process of a service that is ready; its parent is its guard."""
    return next(pid for pid, parent in _parents() if parent == service.guard_pid)


def cpu_s_of(pids: Mapping[str, int]) -> dict[str, float]:
    """CPU seconds per named process, including its children."""
    parents = dict(_parents())
    return {name: _tree_cpu_s(pid, parents) for name, pid in pids.items()}


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
