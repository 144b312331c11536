"""Options of the gateway process, read once: command line, environment and file."""

import argparse
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gateway.chat import formats
from gateway.chat.answer import AUTO, NONE
from gateway.edge import edge_limits
from gateway.edge.edge_limits import EdgeLimits
from gateway.page.demo import problem_with_pipe
from gateway.request.sampling_defaults import AUTO as AUTO_DEFAULTS
from gateway.scheduler.target import SchedulerTarget, scheduler_target
from pagewire.hub.locate import locate
from pagewire.settings import sources
from pagewire.settings.model_folder import problem_with
from wire.identity.options import (
    IdentityOptions,
    add_peer_options,
    add_server_options,
    is_loopback,
    take_identity,
)
from wire.logs.setup import LoggingOptions, add_logging_options, take_logging
from wire.tracing.options import TracingOptions, add_tracing_options, take_tracing

DEFAULT_HOST = "127.0.0.1"
DEFAULT_HTTP_PORT = 8000
DEFAULT_GRPC_PORT = 50051
MAX_PORT = 65535
MAX_PROCESSES = 128
MAX_TIMEOUT_S = 3600.0
MAX_STORED_MIB = 1 << 20
SCHEDULER_TIMEOUT_S = 30.0
DRAIN_TIMEOUT_S = 60.0
HANG_TIMEOUT_S = 10.0
GATHER_MS = 30.0
MAX_GATHER_MS = 1000.0
ANY_ORIGIN = "*"
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@\s]+")
_HOST = re.compile(r"[a-z0-9.-]+")
_PREFIX = re.compile(r"(/[A-Za-z0-9._~-]+)+")
_STARTS = 20.0  # times what it took this process to start, a scheduler may be gone


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """The options of this process. Port 0 takes a free one."""

    model: Path
    scheduler: str  # or several, separated by commas; empty with scheduler_dns
    host: str = DEFAULT_HOST
    http_port: int = DEFAULT_HTTP_PORT
    grpc_port: int = DEFAULT_GRPC_PORT
    served_model_name: str | None = None
    chat_template: Path | None = None  # None: the model's
    text_contents: bool = False  # no content of a conversation becomes a token of control
    generation_config: str = AUTO_DEFAULTS
    api_key: str | None = None
    cors_origins: tuple[str, ...] = ()
    allowed_media_domains: tuple[str, ...] = ()  # hosts that pictures are fetched from
    no_page: bool = False
    demo: Path | None = None  # the pipe of `pagewire up --demo`
    strict_requests: bool = False
    allow_runtime_lora_updating: bool = False
    root_path: str = ""
    store_responses: int = 0  # MiB
    tool_call_parser: str = AUTO
    reasoning_parser: str = AUTO
    drain_timeout_s: float = DRAIN_TIMEOUT_S
    scheduler_dns: str = ""  # name:port, each of whose addresses is a scheduler
    scheduler_timeout_s: float = SCHEDULER_TIMEOUT_S
    gather_ms: float = GATHER_MS
    processes: int = 1
    hang_timeout_s: float = HANG_TIMEOUT_S
    share_ports: bool = False  # with the other gateways of a supervisor
    heartbeat_fd: int | None = None  # a pipe to that supervisor
    metrics_fd: int | None = None  # memory of the metrics of all of them
    metrics_row: int = 0  # ours in it
    identity: IdentityOptions = field(default_factory=IdentityOptions)
    edge: EdgeLimits = field(default_factory=EdgeLimits)
    logs: LoggingOptions = field(default_factory=LoggingOptions)
    tracing: TracingOptions = field(default_factory=TracingOptions)

    def __post_init__(self) -> None:
        if problem := problem_with(self.model, needs="tokenizer.json"):
            raise ValueError(f"--model: {problem}")
        _ = self.scheduler_target
        for option, parser, known in (
            ("--tool-call-parser", self.tool_call_parser, formats.tool_parsers),
            ("--reasoning-parser", self.reasoning_parser, formats.reasoning_parsers),
        ):
            if parser not in (AUTO, NONE) and parser not in (names := known()):
                options = ", ".join((AUTO, NONE, *names))
                raise ValueError(f"{option}: {parser!r} is none of {options}")
        for option, value in (("--http-port", self.http_port), ("--grpc-port", self.grpc_port)):
            if not 0 <= value <= MAX_PORT:
                raise ValueError(f"{option}: {value} is not a port")
        if not 1 <= self.processes <= MAX_PROCESSES:
            raise ValueError(f"--processes: {self.processes} is outside [1, {MAX_PROCESSES}]")
        if not 0 <= self.scheduler_timeout_s <= MAX_TIMEOUT_S:
            problem = f"{self.scheduler_timeout_s} is outside [0, {MAX_TIMEOUT_S}]"
            raise ValueError(f"--scheduler-timeout-s: {problem}")
        if not 0 <= self.gather_ms <= MAX_GATHER_MS:
            raise ValueError(f"--gather-ms: {self.gather_ms} is outside [0, {MAX_GATHER_MS}]")
        if not 0 < self.hang_timeout_s <= MAX_TIMEOUT_S:
            problem = f"{self.hang_timeout_s} is outside (0, {MAX_TIMEOUT_S}]"
            raise ValueError(f"--hang-timeout-s: {problem}")
        self._check_store()
        if self.root_path and not _PREFIX.fullmatch(self.root_path):
            raise ValueError(f"--root-path: {self.root_path!r} is no path (/NAME or /NAME/NAME)")
        for name in self.allowed_media_domains:
            if not _HOST.fullmatch(name):
                raise ValueError(f"--allowed-media-domains: {name!r} is no host in lower case")
        for origin in self.cors_origins:
            if origin != ANY_ORIGIN and not _ORIGIN.fullmatch(origin):
                raise ValueError(f"--cors-origins: {origin!r} is no origin (https://HOST[:PORT])")
        if self.demo is not None and not is_loopback(self.host):
            raise ValueError(f"--demo: on --host {self.host} others could kill the worker")
        if self.demo is not None and (problem := problem_with_pipe(self.demo)):
            raise ValueError(f"--demo: {problem}")
        if self.api_key is not None and self.identity.api_keys is not None:
            raise ValueError("--api-key and --api-keys exclude each other")
        if not 0 <= self.drain_timeout_s <= MAX_TIMEOUT_S:
            problem = f"{self.drain_timeout_s} is outside [0, {MAX_TIMEOUT_S}]"
            raise ValueError(f"--drain-timeout-s: {problem}")
        if self.api_key is not None and not _is_header_text(self.api_key):
            raise ValueError("--api-key: must be visible ASCII characters, at least one")

    def _check_store(self) -> None:
        if not 0 <= self.store_responses <= MAX_STORED_MIB:
            problem = f"{self.store_responses} is outside [0, {MAX_STORED_MIB}]"
            raise ValueError(f"--store-responses: {problem}")
        if self.store_responses and (self.processes > 1 or self.share_ports):
            problem = "each process would have a store of its own; use --processes 1"
            raise ValueError(f"--store-responses: {problem}")

    @property
    def scheduler_target(self) -> SchedulerTarget:
        """The target of the scheduler, or of the active one of several. Raises ValueError."""
        uses_tls = self.identity.tls_ca is not None
        return scheduler_target(self.scheduler, self.scheduler_dns, uses_tls=uses_tls)


def _is_header_text(key: str) -> bool:
    """True if HTTP headers and gRPC metadata can carry the key."""
    return key.isascii() and key.isprintable() and key == key.strip() and key != ""


def scheduler_patience_s(own_start_s: float) -> float:
    """The default of --scheduler-timeout-s, in seconds.

    `own_start_s` is the CPU time that this process took to start: another scheduler starts about
    as fast.
    """
    return min(max(SCHEDULER_TIMEOUT_S, round(_STARTS * own_start_s)), MAX_TIMEOUT_S)


def parse_args(
    argv: Sequence[str] | None = None,
    own_start_s: float = 0.0,
    on_logs: Callable[[LoggingOptions], None] = lambda options: None,
) -> GatewayConfig:
    """The configuration of this process; exits with a usage message on an invalid option.

    A model that a hub has and this machine has not is downloaded now, after `on_logs` was told how
    to log. Raises ModelUnavailable.
    """
    parser = make_parser(own_start_s)
    options = sources.parse(parser, argv, "gateway")
    try:
        identity = take_identity(options)
        edge = edge_limits.take(options)
        logs, tracing = take_logging(options), take_tracing(options)
        on_logs(logs)
        options["model"] = locate(options["model"], with_weights=False).path
        return GatewayConfig(**options, identity=identity, edge=edge, logs=logs, tracing=tracing)
    except ValueError as error:
        parser.error(str(error))


def make_parser(own_start_s: float = 0.0) -> argparse.ArgumentParser:
    """The parser of all options; `own_start_s` as in scheduler_patience_s."""
    parser = argparse.ArgumentParser(
        prog="python -m gateway",
        description="Serves text over OpenAI-compatible HTTP and gRPC, in front of a scheduler.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    sources.add_config(parser)
    add = parser.add_argument
    add(
        "--model",
        type=Path,
        required=True,
        metavar="MODEL",
        help="folder with tokenizer.json, GGUF file, or ORG/NAME[@REVISION] of a hub",
    )
    _add_scheduler(parser)
    _add_ports(parser)
    add("--served-model-name", metavar="NAME", help="name of the model (default: the worker's)")
    _add_model_files(parser)
    _add_formats(parser)
    add("--api-key", metavar="KEY", help="one bearer token with all roles")
    _add_callers(parser)
    _add_page(parser)
    add_server_options(parser)
    add_peer_options(parser, serves=False, calls=True)
    _add_limits(parser, own_start_s)
    _add_processes(parser)
    add_logging_options(parser)
    add_tracing_options(parser)
    edge_limits.add_arguments(parser)
    return parser


def _add_formats(parser: argparse.ArgumentParser) -> None:
    """Plug-ins bring names of their own, so that no list of choices can be whole."""
    for option, what, known in (
        ("--tool-call-parser", "tool calls", tuple(formats.FORMATS)),
        ("--reasoning-parser", "reasoning", tuple(formats.REASONING)),
    ):
        parser.add_argument(
            option,
            default=AUTO,
            metavar="NAME",
            help=f"format of the model's {what}: auto (from its chat template), none, "
            f"{', '.join(known)}, or one of a plug-in",
        )


def _add_scheduler(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--scheduler",
        default="",
        metavar="HOST:PORT",
        help="address of the scheduler; or IP:PORT,IP:PORT of several, of which one is active and "
        "the others stand by",
    )
    add(
        "--scheduler-dns",
        default="",
        metavar="NAME:PORT",
        help="instead: a name, each of whose addresses is one of these schedulers",
    )


def _add_page(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--no-page", action="store_true", help="no page at /")
    add(
        "--demo",
        type=Path,
        metavar="PIPE",
        help="the page can kill the worker; from `pagewire up --demo`, on loopback alone",
    )


def _add_processes(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--processes",
        type=int,
        default=1,
        metavar="N",
        help="number of gateway processes on the same ports; each uses about one core",
    )
    add(
        "--hang-timeout-s",
        type=float,
        default=HANG_TIMEOUT_S,
        metavar="S",
        help="seconds without a sign of life after which one of several processes is replaced",
    )
    # Set by the supervisor of several processes.
    add("--share-ports", action="store_true", help=argparse.SUPPRESS)
    for hidden in ("--heartbeat-fd", "--metrics-fd", "--metrics-row"):
        add(hidden, type=int, default=argparse.SUPPRESS, help=argparse.SUPPRESS)


def _add_callers(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--cors-origins",
        type=sources.comma_separated,
        default=(),
        metavar="ORIGIN,ORIGIN",
        help="pages of these origins may call from a browser, of all with *; by default none may",
    )
    add(
        "--allowed-media-domains",
        type=sources.comma_separated,
        default=(),
        metavar="HOST,HOST",
        help="hosts that pictures are fetched from, by http: and https: URLs; by default none is, "
        "and pictures come as data: URLs",
    )
    add(
        "--root-path",
        default="",
        metavar="/PREFIX",
        help="what a proxy puts before the paths of the HTTP API, whether it removes it or not",
    )
    add(
        "--strict-requests",
        action="store_true",
        help="refuse fields that are not known, instead of ignoring them with a warning header",
    )
    add(
        "--allow-runtime-lora-updating",
        action="store_true",
        help="operators may load adapters from folders of the workers' hosts, and unload them",
    )
    add(
        "--store-responses",
        type=int,
        default=0,
        metavar="MIB",
        help="MiB of memory for responses that later requests continue or read (0: none is kept)",
    )


def _add_ports(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--host", default=DEFAULT_HOST, help="address to listen on")
    add("--http-port", type=int, default=DEFAULT_HTTP_PORT, help="OpenAI-compatible API")
    add("--grpc-port", type=int, default=DEFAULT_GRPC_PORT, help="InferenceService")


def _add_model_files(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--chat-template",
        type=Path,
        metavar="FILE|deepseek_v32",
        help="Jinja template of chats (default: the model's own), or the name of one of ours",
    )
    parser.add_argument(
        "--text-contents",
        action="store_true",
        help="encode the contents of chats as text: what spells a special token there is none",
    )
    parser.add_argument(
        "--generation-config",
        default=AUTO_DEFAULTS,
        metavar="auto|none|FOLDER",
        help="whose generation_config.json sets the sampling defaults: the model's, none's, or "
        "that of a folder",
    )


def _add_limits(parser: argparse.ArgumentParser, own_start_s: float) -> None:
    parser.add_argument(
        "--scheduler-timeout-s",
        type=float,
        default=scheduler_patience_s(own_start_s),
        metavar="S",
        help="seconds that requests wait for a lost scheduler (0: fail at once); by default 30, or "
        "20 times the CPU time of this process's start if that is longer",
    )
    parser.add_argument(
        "--drain-timeout-s",
        type=float,
        default=DRAIN_TIMEOUT_S,
        metavar="S",
        help="seconds that running requests have after SIGTERM; what is left ends with an error",
    )
    parser.add_argument(
        "--gather-ms",
        type=float,
        default=GATHER_MS,
        metavar="MS",
        help="most milliseconds between two messages of a stream that its tokens wait for each "
        "other, while this process uses more than half of a core (0: they never wait)",
    )
