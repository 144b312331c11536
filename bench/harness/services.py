"""Starts and stops the three services on free ports of this machine, for the benchmarks."""

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from pagewire.cli.launcher import services
from pagewire.cli.launcher.processes import Services
from pagewire.v1 import inference_pb2, inference_pb2_grpc

ROOT = Path(__file__).parents[2]
ARCHIVED_COMMIT = ROOT / "bench" / "archived_commit.txt"
START_TIMEOUT_S = 240.0


class ProductFailed(RuntimeError):
    """Raised when the product did not do what was asked of it."""


@dataclass(frozen=True, slots=True)
class Ports:
    """The ports of the services."""

    worker: int
    scheduler: int
    gateway_http: int
    gateway_grpc: int


def free_ports() -> Ports:
    """Four ports that nothing listens on now."""
    return Ports(*services.free_ports(4))


def settings(
    ports: Ports,
    worker_options: Sequence[str] = (),
    scheduler_options: Sequence[str] = (),
    gateway_options: Sequence[str] = (),
) -> services.Settings:
    """The product on these ports of this machine."""
    return services.Settings(
        host=services.LOOPBACK,
        http_port=ports.gateway_http,
        grpc_port=ports.gateway_grpc,
        scheduler_port=ports.scheduler,
        worker_port=ports.worker,
        worker_options=tuple(worker_options),
        scheduler_options=tuple(scheduler_options),
        gateway_options=tuple(gateway_options),
    )


@contextlib.contextmanager
def launched(
    specs: Sequence[services.ServiceSpec], is_ready: Callable[[], bool]
) -> Iterator[Services]:
    """Starts services, waits until they are ready, and ends them after the block.

    Raises CommandError with the end of its log when one ends, or when the time is up.
    """
    with (
        tempfile.TemporaryDirectory(prefix="pagewire-bench-") as logs,
        Services(ROOT, Path(logs)) as running,
    ):
        running.start(specs)
        running.wait_until(specs[-1].name, is_ready, START_TIMEOUT_S)
        yield running


@contextlib.contextmanager
def running(model: Path, worker_options: Sequence[str] = ()) -> Iterator[str]:
    """Starts the three services, waits until they serve, yields the gateway's gRPC address."""
    specs = services.plan(settings(free_ports(), worker_options), model)
    address = specs[-1].address
    with grpc.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)

        def is_served() -> bool:
            with contextlib.suppress(grpc.RpcError):
                return bool(stub.ListModels(inference_pb2.ListModelsRequest(), timeout=5).models)
            return False

        with launched(specs, is_served):
            yield address


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
