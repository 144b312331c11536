"""`pagewire up`: runs all three services on this machine, with a sample answer."""

import argparse
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

import grpc

from pagewire._channel import Connection, open_channel
from pagewire._client import Client
from pagewire._terminal import StatusLine, Style
from pagewire.cli import health
from pagewire.cli.launcher.identity import LocalIdentity, check_options, local_identity
from pagewire.cli.launcher.invitation import invitation
from pagewire.cli.launcher.processes import POLL_S, Services
from pagewire.cli.launcher.services import Settings, check_ports, find_checkout, plan
from pagewire.cli.options import CommandError, add_command

if TYPE_CHECKING:
    from pagewire.cli.options import Subparsers

QUESTION = "What is the capital of France?"
MAX_SAMPLE_TOKENS = 32
PROBE_S = 5.0  # a service that loads a model may take long to answer
REPORT_S = 10.0  # interval of progress lines where they cannot be rewritten
HERE = Path(__file__).resolve().parents[3]


class StopRequested(BaseException):
    """Raised on a stop signal; like KeyboardInterrupt, not an Exception."""


def add_parser(commands: "Subparsers") -> None:
    """Adds the command."""
    parser = add_command(commands, "up", "Start worker, scheduler and gateway on this machine.")
    add = parser.add_argument
    add("--model", type=Path, metavar="DIR", help="model folder (default: the embedded one)")
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
    add(
        "--startup-timeout-s",
        type=float,
        default=900.0,
        help="seconds after which to give up on a service that is not ready and has logged nothing "
        "new, and on the sample answer",
    )
    add("--log-dir", type=Path, metavar="DIR", help="folder for logs (default: a new one)")
    add("--checkout", type=Path, default=HERE, metavar="DIR", help="folder with the services' code")
    parser.set_defaults(run=run)


def words(text: str) -> tuple[str, ...]:
    """The options of a service. Raises ValueError for an unclosed quotation."""
    return tuple(shlex.split(text))


def run(options: argparse.Namespace) -> int:
    """Starts the services and serves until stopped; returns 0 unless something failed."""
    if options.once and options.no_sample:
        raise ValueError("--once and --no-sample together have no effect")
    settings = Settings(
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
        worker_options=options.worker_options,
        scheduler_options=options.scheduler_options,
        gateway_options=options.gateway_options,
    )
    checkout = find_checkout(options.checkout.resolve())
    check_ports(settings.ports)
    check_options(settings, options)
    journal = Journal()
    has_answered = False
    try:
        with _stop_signals():
            model = _model_folder(options.model, checkout, journal)
            logs = _log_folder(options.log_dir, journal)
            with (
                local_identity(settings, options, logs) as identity,
                Services(checkout, logs) as services,
            ):
                _start(services, identity, model, options.startup_timeout_s, journal)
                if not options.no_sample and identity.can_ask:
                    _ask(identity, options.startup_timeout_s, journal)
                    has_answered = True
                if not options.once:
                    journal.say(invitation(identity, model.name, journal.style))
                    _serve(services, journal)
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


@contextmanager
def _stop_signals() -> Iterator[None]:
    """Raises StopRequested on stop signals.

    A second signal does not wait for the services to end; their guards end them.
    """

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        raise StopRequested(signal.Signals(number).name)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _model_folder(given: Path | None, checkout: Path, journal: Journal) -> Path:
    if given is not None:
        folder = given.resolve()  # absolute, since the services run in another folder
        if not (folder / "config.json").is_file():
            raise CommandError(f"--model: {folder} holds no config.json")
    else:
        folder = _default_model(checkout)
    journal.done("model", folder.name)
    return folder


def _default_model(checkout: Path) -> Path:
    """Creates the embedded model's folder, with its progress on stderr."""
    command = [sys.executable, "-m", "default_model"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=checkout) as making:
        try:
            printed, _ = making.communicate()
        except BaseException:
            making.terminate()  # the next run starts anew
            raise
    if making.returncode:
        raise CommandError(
            f"the embedded model could not be made (status {making.returncode}); "
            "give a model folder with --model"
        )
    return Path(printed.strip())


def _log_folder(given: Path | None, journal: Journal) -> Path:
    folder = given.resolve() if given else Path(tempfile.mkdtemp(prefix="pagewire-"))
    folder.mkdir(parents=True, exist_ok=True)
    journal.done("logs", str(folder))
    return folder


def _start(
    services: Services, identity: LocalIdentity, model: Path, timeout_s: float, journal: Journal
) -> None:
    """Starts all services and waits until each serves. Raises CommandError."""
    if identity.ca is not None:
        journal.done("tls", f"test certificates, signed by {identity.ca}")
    specs = plan(identity.settings, model)
    services.start(specs)
    reached = {spec.name: Connection(spec.address, tls=identity.tls) for spec in specs}
    channels = {name: open_channel(connection) for name, connection in reached.items()}
    try:
        for spec in specs:
            services.wait_until(
                spec.name,
                _probe(channels[spec.name], spec.address),
                timeout_s,
                partial(journal.waiting, f"waiting for the {spec.name}"),
            )
            journal.done(spec.name, spec.address)
    finally:
        for channel in channels.values():
            channel.close()


def _probe(channel: grpc.Channel, address: str) -> Callable[[], bool]:
    return lambda: health.check_on(channel, address, timeout_s=PROBE_S).is_serving


def _ask(identity: LocalIdentity, timeout_s: float, journal: Journal) -> None:
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


def _serve(services: Services, journal: Journal) -> NoReturn:
    """Watches the services until a stop signal, or until one ends for good."""
    while True:
        for event in services.renew():
            journal.say(event)
        services.check()
        time.sleep(POLL_S)
