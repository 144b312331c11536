"""`pagewire up`: runs all three services on this machine, with a sample answer."""

import argparse
import os
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn, Self

from pagewire._channel import Connection
from pagewire.cli.launcher import sample
from pagewire.cli.launcher.demo import DemoPipe, check_demo, demo_pipe, with_demo
from pagewire.cli.launcher.identity import LocalIdentity, check_options, local_identity
from pagewire.cli.launcher.invitation import invitation
from pagewire.cli.launcher.journal import Journal
from pagewire.cli.launcher.models import FoundModel, find_model
from pagewire.cli.launcher.options.draft_model import words_for_worker
from pagewire.cli.launcher.options.settings_of_up import check_reserved, settings_line, with_config
from pagewire.cli.launcher.options.up_options import add_options, explain_unknown, passed_words
from pagewire.cli.launcher.processes import POLL_S, Services
from pagewire.cli.launcher.sample import SampleOutcome
from pagewire.cli.launcher.served import served
from pagewire.cli.launcher.services import (
    Settings,
    check_ports,
    choose_gateway_processes,
    find_checkout,
    plan,
)
from pagewire.cli.launcher.supervisor import ServiceSupervisor, TimeLimits
from pagewire.cli.options import CommandError, add_command
from pagewire.cli.requirements import require

if TYPE_CHECKING:
    from pagewire.cli.options import Subparsers


class StopRequested(BaseException):
    """Raised on a stop signal; like KeyboardInterrupt, not an Exception."""


def add_parser(commands: "Subparsers") -> None:
    """Adds the command."""
    parser = add_command(commands, "up", "Start worker, scheduler and gateway on this machine.")
    add_options(parser)
    parser.set_defaults(run=run, explain_unknown=explain_unknown)


def run(options: argparse.Namespace) -> int:
    """Starts the services and serves until stopped; returns 0 unless something failed."""
    if options.once and options.no_sample:
        raise ValueError("--once and --no-sample together have no effect")
    check_reserved(options.config, os.environ)
    processes = _gateway_processes(passed_words(options, "gateway"))
    settings = with_config(_settings(options, processes), options.config)
    checkout = find_checkout(options.checkout.resolve())
    require("worker", "scheduler", "gateway", *(() if options.model else ("default-model",)))
    check_demo(options.demo, settings)
    check_ports(settings.ports)
    limits = TimeLimits(options.startup_timeout_s, options.hang_timeout_s, options.drain_timeout_s)
    check_options(settings, options)
    journal = Journal()
    has_answered = False
    try:
        with StopSignals() as signals:
            if line := settings_line(options.config, os.environ):
                journal.done("settings", line)
            model = find_model(options.model, checkout)
            journal.done("model", model.label)
            logs = _log_folder(options.log_dir, journal)
            if processes:
                overrides = "--gateway-options='--processes N' overrides"
                journal.done("gateways", f"{processes[1]} on the same ports; {overrides}")
            with (
                demo_pipe(options.demo, logs) as demo,
                local_identity(with_demo(settings, demo), options, logs) as identity,
                Services(checkout, logs) as services,
                _supervised(services, identity, model, limits, journal, signals) as up,
            ):
                _start(up, identity, journal)
                outcome = _ask(options, identity, journal, up)
                has_answered = not outcome.problem
                if not options.once:
                    journal.say(invitation(identity, model.name, outcome, journal.style))
                    _serve(up, demo)
                journal.say("stopping")
    except StopRequested:
        journal.say("stopped")
        return 0 if has_answered or not options.once else 1
    return 0


def _ask(
    options: argparse.Namespace,
    identity: LocalIdentity,
    journal: Journal,
    up: ServiceSupervisor,
) -> SampleOutcome:
    """Asks the sample question, if it may. Raises CommandError if it is all that was wanted."""
    if options.no_sample or not identity.can_ask:
        return SampleOutcome()
    outcome = sample.ask(identity, options.startup_timeout_s, journal, up)
    if outcome.problem and options.once:
        raise CommandError(outcome.problem)
    if outcome.problem:
        journal.say(f"the sample question failed, and the server stays up: {outcome.problem}")
    return outcome


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
        """True if a second signal has come."""
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

    def __exit__(self, *_: object) -> None:
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
        worker_options=(
            *words_for_worker(options.speculative_config),
            *passed_words(options, "worker"),
        ),
        scheduler_options=passed_words(options, "scheduler"),
        gateway_options=(*processes, *passed_words(options, "gateway")),
    )


def _gateway_processes(given: Sequence[str]) -> tuple[str, ...]:
    """The option for several gateways, where the cores suggest it and the user does not choose."""
    num_processes = choose_gateway_processes(len(os.sched_getaffinity(0)))
    # Stored responses are in the memory of one process.
    decides = any(word.partition("=")[0] in ("--processes", "--store-responses") for word in given)
    return () if decides or num_processes == 1 else ("--processes", str(num_processes))


def _log_folder(given: Path | None, journal: Journal) -> Path:
    folder = given.resolve() if given else Path(tempfile.mkdtemp(prefix="pagewire-"))
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    journal.done("logs", str(folder))
    return folder


@contextmanager
def _supervised(
    services: Services,
    identity: LocalIdentity,
    model: FoundModel,
    limits: TimeLimits,
    journal: Journal,
    signals: StopSignals,
) -> Iterator[ServiceSupervisor]:
    """Starts the services and keeps them alive; a stop signal inside the block drains them."""
    signals.interrupts = False
    specs = {
        spec: Connection(spec.address, tls=identity.tls)
        for spec in plan(identity.settings, model.path, model.name)
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
        if name == "scheduler" and (
            line := served(replace(connection, api_key=identity.peer_token))
        ):
            journal.done("serving", line)


def _serve(supervisor: ServiceSupervisor, demo: DemoPipe | None) -> NoReturn:
    """Keeps the services alive until a stop signal, or until one dies again and again."""
    while True:
        if demo is not None and demo.asks_for_kill():
            supervisor.kill("worker", "the page asked for it")
        supervisor.tick()
        time.sleep(POLL_S)
