"""The command lines and addresses of the three services, and checks before they start.

It starts no process; it only checks whether ports and modules are available.
"""

import errno
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from pagewire.cli.options import CommandError

LOOPBACK = "127.0.0.1"
MODULES = ("worker_svc", "scheduler_svc", "gateway")
NO_CONFIG = (("PAGEWIRE_CONFIG", ""),)  # a file for services goes to them by --config
CORES_PER_GATEWAY, MAX_GATEWAYS = 4, 4


@dataclass(frozen=True, slots=True)
class Port:
    """A port to listen on, and its option."""

    option: str
    host: str
    number: int


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings of the user. None and 0 leave the choice to the service."""

    host: str
    http_port: int
    grpc_port: int
    scheduler_port: int
    worker_port: int
    dtype: str | None = None
    device: str | None = None
    attention_backend: str | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_model_len: int | None = None
    num_kv_blocks: int | None = None
    tensor_parallel_size: int | None = None
    drain_timeout_s: float | None = None
    # Further arguments for each service, after those above.
    worker_options: tuple[str, ...] = ()
    scheduler_options: tuple[str, ...] = ()
    gateway_options: tuple[str, ...] = ()
    # Further variables of the gateway: what must not stand among its arguments.
    gateway_environ: tuple[tuple[str, str], ...] = field(default=(), repr=False)

    @property
    def ports(self) -> tuple[Port, ...]:
        """Every port, the public ones first."""
        return (
            Port("--http-port", self.host, self.http_port),
            Port("--grpc-port", self.host, self.grpc_port),
            Port("--scheduler-port", LOOPBACK, self.scheduler_port),
            Port("--worker-port", LOOPBACK, self.worker_port),
        )

    @property
    def reachable_host(self) -> str:
        """The gateway's host as seen from this machine."""
        return LOOPBACK if self.host in ("0.0.0.0", "::", "") else self.host


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """One service to start."""

    name: str
    module: str
    arguments: tuple[str, ...]
    address: str  # of its gRPC health service
    environ: tuple[tuple[str, str], ...] = field(default=(), repr=False)  # variables to set
    folder: Path | None = None  # to run in; None: that of the code


def choose_gateway_processes(num_cores: int) -> int:
    """The number of gateways to start on this machine.

    Each uses up to one core; the worker, the scheduler and what else runs here need the others.
    """
    return min(max(1, num_cores // CORES_PER_GATEWAY), MAX_GATEWAYS)


def plan(settings: Settings, model: Path, name: str = "") -> tuple[ServiceSpec, ...]:
    """The three services: worker, scheduler, gateway; an empty name is the folder's."""
    served_name = () if name in ("", model.name) else ("--served-model-name", name)
    worker = f"{LOOPBACK}:{settings.worker_port}"
    scheduler = f"{LOOPBACK}:{settings.scheduler_port}"
    limits = _given(
        ("--max-num-seqs", settings.max_num_seqs),
        ("--max-num-batched-tokens", settings.max_num_batched_tokens),
    )
    drain = _given(("--drain-timeout-s", settings.drain_timeout_s))
    return (
        ServiceSpec(
            "worker",
            "worker_svc",
            (
                *("--model", str(model), "--host", LOOPBACK, "--port", str(settings.worker_port)),
                *(*served_name, *limits, *_of_worker(settings), *drain),
                *settings.worker_options,
            ),
            worker,
            NO_CONFIG,
        ),
        ServiceSpec(
            "scheduler",
            "scheduler_svc",
            (
                *("--worker", worker, "--host", LOOPBACK, "--port", str(settings.scheduler_port)),
                *(*limits, *drain),
                *settings.scheduler_options,
            ),
            scheduler,
            NO_CONFIG,
        ),
        ServiceSpec(
            "gateway",
            "gateway",
            (
                *("--model", str(model), "--scheduler", scheduler, "--host", settings.host),
                *("--http-port", str(settings.http_port), "--grpc-port", str(settings.grpc_port)),
                *drain,
                *settings.gateway_options,
            ),
            f"{settings.reachable_host}:{settings.grpc_port}",
            (*NO_CONFIG, *settings.gateway_environ),
        ),
    )


def _of_worker(settings: Settings) -> tuple[str, ...]:
    return _given(
        ("--dtype", settings.dtype),
        ("--device", settings.device),
        ("--attention-backend", settings.attention_backend),
        ("--max-model-len", settings.max_model_len),
        ("--num-kv-blocks", settings.num_kv_blocks),
        ("--tensor-parallel-size", settings.tensor_parallel_size),
    )


def _given(*options: tuple[str, str | float | None]) -> tuple[str, ...]:
    return tuple(
        word for name, value in options if value is not None for word in (name, str(value))
    )


def free_ports(count: int) -> list[int]:
    """So many ports of the loopback interface that nothing listens on now."""
    with ExitStack() as held:
        probes = [held.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind((LOOPBACK, 0))
        return [int(probe.getsockname()[1]) for probe in probes]


def find_checkout(folder: Path) -> Path:
    """Returns the folder if it has the services' code. Raises CommandError."""
    missing = [name for name in MODULES if not (folder / name / "__main__.py").is_file()]
    if missing:
        raise CommandError(
            f"{folder} holds no {' and no '.join(missing)}: --checkout is for a checkout of the "
            "repository; without it the services are those of the installed package"
        )
    return folder


def check_ports(ports: Sequence[Port]) -> None:
    """Raises CommandError for ports that collide or are in use."""
    seen: dict[int, str] = {}
    for port in ports:
        if not 0 < port.number < 65536:
            raise CommandError(f"{port.option}: {port.number} is not a port (1 to 65535)")
        if port.number in seen:
            raise CommandError(f"{seen[port.number]} and {port.option} are both {port.number}")
        seen[port.number] = port.option
    for port in ports:
        _check_free(port)


def _check_free(port: Port) -> None:
    family = socket.AF_INET6 if ":" in port.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As the servers do: a port with connections in TIME_WAIT is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((port.host, port.number))
        except OSError as error:
            what = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be used ({error})"
            raise CommandError(
                f"port {port.number} on {port.host} {what}; choose another with {port.option}"
            ) from None
