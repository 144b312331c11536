"""`pagewire up`: runs all three services on this machine, with a sample answer."""

import argparse
import math
import os
import shlex
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn, Self

from pagewire._channel import Connection
from pagewire._client import Client
from pagewire._terminal import StatusLine, Style
from pagewire.cli.launcher.identity import LocalIdentity, check_options, local_identity
from pagewire.cli.launcher.invitation import invitation
from pagewire.cli.launcher.models import ServedFolder, find_model
from pagewire.cli.launcher.processes import POLL_S, Services
from pagewire.cli.launcher.services import (
    Settings,
    check_ports,
    choose_gateway_processes,
    find_checkout,
    plan,
)
from pagewire.cli.launcher.supervisor import ServiceSupervisor, TimeLimits
from pagewire.cli.options import CommandError, add_command

if TYPE_CHECKING:
    from pagewire.cli.options import Subparsers

QUESTION = "What is the capital of France?"
MAX_SAMPLE_TOKENS = 32
REPORT_S = 10.0  # interval of progress lines where they cannot be rewritten
HERE = Path(__file__).resolve().parents[3]


class StopRequested(BaseException):
    """Raised on a stop signal; like KeyboardInterrupt, not an Exception."""


def add_parser(commands: "Subparsers") -> None:
    """Adds the command."""
    parser = add_command(commands, "up", "Start worker, scheduler and gateway on this machine.")
    add = parser.add_argument
    add(
        "--model",
        type=Path,
        metavar="MODEL",
        help="model folder, or ORG/NAME[@REVISION] of a hub (default: the embedded one)",
    )
    add(
        "--dtype",
        default="auto",
        choices=("auto", "float32", "bfloat16", "float16"),
        help="type of weights and activations",
    )
    add("--device", default="auto", choices=("auto", "cpu", "cuda"), help="device to compute on")
    add(
        "--attention-backend",
        default="auto",
        choices=("auto", "triton", "flash-attn"),
        help="attention kernels on cuda; auto: the fastest that is installed",
    )
    add("--host", default="127.0.0.1", help="address the gateway listens on")
    add("--http-port", type=int, default=8000, help="OpenAI-compatible API")
    add("--grpc-port", type=int, default=50051, help="gRPC API")
    add("--scheduler-port", type=int, default=50052, help="scheduler, on 127.0.0.1")
    add("--worker-port", type=int, default=50053, help="worker, on 127.0.0.1")
    add("--max-num-seqs", type=int, metavar="N", help="most running requests")
    add("--max-num-batched-tokens", type=int, metavar="N", help="most tokens per step")
    add("--max-model-len", type=int, metavar="N", help="most tokens of prompt plus output")
    add("--num-kv-blocks", type=int, metavar="N", help="blocks of the KV cache")
    add("--tensor-parallel-size", type=int, metavar="N", help="GPUs that share the model")
    for service in ("worker", "scheduler", "gateway"):
        add(
            f"--{service}-options",
            type=words,
            default=(),
            metavar="WORDS",
            help=f"further options of the {service}, split as by a shell; write =WORDS",
        )
    add("--tls", action="store_true", help="TLS on all ports, with test certificates made at start")
    add("--api-keys", type=Path, metavar="FILE", help="API keys, from `pagewire keys new`")
    add("--once", action="store_true", help="stop after the sample answer")
    add("--no-sample", action="store_true", help="do not ask the sample question")
    _add_limits(parser)
    add("--log-dir", type=Path, metavar="DIR", help="folder for logs (default: a new one)")
    add("--checkout", type=Path, default=HERE, metavar="DIR", help="folder with the services' code")
    parser.set_defaults(run=run)


def _add_limits(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--startup-timeout-s",
        type=float,
        default=900.0,
        help="seconds after which to give up on a service that is not ready and has logged nothing "
        "new, and on the sample answer",
    )
    add(
        "--drain-timeout-s",
        type=seconds,
        default=60.0,
        help="seconds that running requests have after SIGTERM or Ctrl-C; what is left ends with "
        "an error, and so does everything at a second signal",
    )
    add(
        "--hang-timeout-s",
        type=seconds,
        default=10.0,
        help="seconds without an answer to health checks after which a service is killed and "
        "restarted; up to six times as long where answers come late",
    )


def seconds(text: str) -> float:
    """A duration. Raises ValueError unless it is finite and not negative."""
    value = float(text)
    if not 0 <= value < math.inf:
        raise ValueError(f"{text} is not a duration in seconds")
    return value


def words(text: str) -> tuple[str, ...]:
    """The options of a service. Raises ValueError for an unclosed quotation."""
    return tuple(shlex.split(text))


def run(options: argparse.Namespace) -> int:
    """Starts the services and serves until stopped; returns 0 unless something failed."""
    if options.once and options.no_sample:
        raise ValueError("--once and --no-sample together have no effect")
    processes = _gateway_processes(options.gateway_options)
    settings = _settings(options, processes)
    checkout = find_checkout(options.checkout.resolve())
    check_ports(settings.ports)
    limits = TimeLimits(options.startup_timeout_s, options.hang_timeout_s, options.drain_timeout_s)
    check_options(settings, options)
    journal = Journal()
    has_answered = False
    try:
        with StopSignals() as signals:
            model = find_model(options.model, checkout)
            journal.done("model", model.label)
            logs = _log_folder(options.log_dir, journal)
            if processes:
                overrides = "--gateway-options='--processes N' overrides"
                journal.done("gateways", f"{processes[1]} on the same ports; {overrides}")
            with (
                local_identity(settings, options, logs) as identity,
                Services(checkout, logs) as services,
                _supervised(services, identity, model, limits, journal, signals) as up,
            ):
                _start(up, identity, journal)
                if not options.no_sample and identity.can_ask:
                    _ask(identity, options.startup_timeout_s, journal, up)
                    has_answered = True
                if not options.once:
                    journal.say(invitation(identity, model.name, journal.style))
                    _serve(up)
                journal.say("stopping")
    except StopRequested:
        journal.say("stopped")
        return 0 if has_answered or not options.once else 1
    return 0


class Journal:
    """Prints finished steps and their time to stdout."""

    def __init__(self) -> None:
        self.style = Style(sys.stdout)
        self._line = StatusLine(sys.stdout)
        self._start_s = time.monotonic()
        self._next_s = self._start_s + REPORT_S

    def say(self, text: str) -> None:
        """Prints one line."""
        self._line.clear()
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()

    def done(self, what: str, detail: str) -> None:
        """Prints a finished step, with the seconds since the start."""
        seconds = self.style.dim(f"{time.monotonic() - self._start_s:.1f} s")
        self.say(f"{self.style.green(f'{what:<10}')}{detail}  {seconds}")

    def waiting(self, what: str) -> None:
        """Shows a slow step: rewritten in place on a terminal, printed now and then elsewhere."""
        now_s = time.monotonic()
        text = f"{what}, {now_s - self._start_s:.0f} s"
        self._line.show(self.style.dim(text))
        if now_s >= self._next_s and not sys.stdout.isatty():
            self._next_s = now_s + REPORT_S
            self.say(text)


class StopSignals:
    """The stop signals that have come: the first asks for a drain, the second for an end.

    StopRequested is raised by the handler while `interrupts` holds, and then by `check`: raised at
    any place, it could be lost where errors are ignored, in a finalizer for example.
    """

    NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self._count = 0
        self.interrupts = True

    @property
    def is_urgent(self) -> bool:
        """Whether a second signal has come."""
        return self._count > 1

    def check(self) -> None:
        """Raises StopRequested if a signal has come."""
        if self._count:
            raise StopRequested

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._count += 1
        if self.interrupts:
            raise StopRequested

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._note) for number in self.NUMBERS}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def _settings(options: argparse.Namespace, processes: Sequence[str]) -> Settings:
    return Settings(
        host=options.host,
        http_port=options.http_port,
        grpc_port=options.grpc_port,
        scheduler_port=options.scheduler_port,
        worker_port=options.worker_port,
        dtype=options.dtype,
        device=options.device,
        attention_backend=options.attention_backend,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_model_len=options.max_model_len,
        num_kv_blocks=options.num_kv_blocks,
        tensor_parallel_size=options.tensor_parallel_size,
        drain_timeout_s=options.drain_timeout_s,
        worker_options=options.worker_options,
        scheduler_options=options.scheduler_options,
        gateway_options=(*processes, *options.gateway_options),
    )


def _gateway_processes(given: Sequence[str]) -> tuple[str, ...]:
    """The option for several gateways, where the cores suggest it and the user does not choose."""
    num_processes = choose_gateway_processes(len(os.sched_getaffinity(0)))
    is_given = any(word.partition("=")[0] == "--processes" for word in given)
    return () if is_given or num_processes == 1 else ("--processes", str(num_processes))


def _log_folder(given: Path | None, journal: Journal) -> Path:
    folder = given.resolve() if given else Path(tempfile.mkdtemp(prefix="pagewire-"))
    folder.mkdir(parents=True, exist_ok=True)
    journal.done("logs", str(folder))
    return folder


@contextmanager
def _supervised(
    services: Services,
    identity: LocalIdentity,
    model: ServedFolder,
    limits: TimeLimits,
    journal: Journal,
    signals: StopSignals,
) -> Iterator[ServiceSupervisor]:
    """Starts the services and keeps them alive; a stop signal inside the block drains them."""
    signals.interrupts = False
    specs = {
        spec: Connection(spec.address, tls=identity.tls)
        for spec in plan(identity.settings, model.folder, model.name)
    }
    supervisor = ServiceSupervisor(services, specs, limits, journal.say, signals.check)
    try:
        yield supervisor
    except StopRequested:
        journal.say(
            f"stopping: running requests have {limits.drain_timeout_s:g} s to end; "
            "a second signal ends them"
        )
        supervisor.drain(lambda: signals.is_urgent)
        raise
    finally:
        supervisor.close()


def _start(supervisor: ServiceSupervisor, identity: LocalIdentity, journal: Journal) -> None:
    """Waits until each service serves. Raises CommandError."""
    if identity.ca is not None:
        journal.done("tls", f"test certificates, signed by {identity.ca}")
    for name, connection in supervisor.connections.items():
        supervisor.wait_until_ready(name, partial(journal.waiting, f"waiting for the {name}"))
        journal.done(name, connection.target)


def _ask(
    identity: LocalIdentity, timeout_s: float, journal: Journal, supervisor: ServiceSupervisor
) -> None:
    """Streams the sample answer while the services are watched. Raises what went wrong."""
    asked: Future[None] = Future()

    def ask() -> None:
        try:
            _stream_sample(identity, timeout_s, journal)
        except BaseException as error:
            asked.set_exception(error)
        else:
            asked.set_result(None)

    threading.Thread(target=ask, name="sample", daemon=True).start()
    while not asked.done():
        supervisor.tick()
        time.sleep(POLL_S)
    asked.result()


def _stream_sample(identity: LocalIdentity, timeout_s: float, journal: Journal) -> None:
    """Streams the sample answer. Raises CommandError if it is empty."""
    journal.say(f"\n{journal.style.bold(QUESTION)}")
    target = f"{identity.settings.reachable_host}:{identity.settings.grpc_port}"
    with Client(
        target,
        api_key=identity.api_key,
        tls=identity.tls,
        timeout_s=timeout_s,
        allow_insecure_key=True,  # to this machine
    ) as client:
        stream = client.stream_chat(QUESTION, temperature=0, max_tokens=MAX_SAMPLE_TOKENS)
        for delta in stream:
            sys.stdout.write(delta.text)
            sys.stdout.flush()
    journal.say("")
    if not stream.text.strip():
        raise CommandError("the model gave an empty answer")


def _serve(supervisor: ServiceSupervisor) -> NoReturn:
    """Keeps the services alive until a stop signal, or until one dies again and again."""
    while True:
        supervisor.tick()
        time.sleep(POLL_S)
