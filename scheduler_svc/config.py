"""Options of the scheduler process, read once: command line, environment and file."""

import argparse
import math
from dataclasses import dataclass, field

from pagewire.settings import sources
from scheduler_svc.core import CachePolicy, Policy, Preemption
from scheduler_svc.journal.options import (
    RecordOptions,
    add_record_options,
    take_record_options,
)
from scheduler_svc.kv_events.options import KvEventOptions, add_kv_events_option, take_kv_events
from scheduler_svc.speculation.options import (
    SpeculationOptions,
    add_speculation_option,
    take_speculation,
)
from wire.identity.options import (
    MAX_PORT,
    IdentityOptions,
    add_peer_options,
    add_server_options,
    take_identity,
)
from wire.logs.setup import LoggingOptions, add_logging_options, take_logging
from wire.tracing.options import TracingOptions, add_tracing_options, take_tracing

MAX_GRANT = 64
MAX_ADDRESS_CHARS = 300  # a name has at most 253
# By default twice as many requests may wait as may run: they wait about two services long. At
# least so many, that a few slots do not refuse a burst.
WAITING_PER_SEQ, LEAST_WAITING = 2, 16
DEFAULT_WORKER = "127.0.0.1:50053"
_NOT_NEGATIVE = (
    "state_check_interval",
    "queue_window",
    "max_overtakes",
    "max_waiting_requests",
    "max_waiting_tokens",
    "max_waiting_requests_per_tenant",
    "max_waiting_tokens_per_tenant",
    "metrics_tenants",
)


@dataclass(frozen=True, slots=True)
class ServiceConfig:
    """Addresses, step and failure-detection settings, and limits of the policy.

    Raises ValueError, naming the option, when a value or a combination cannot work.
    """

    workers: tuple[str, ...]  # host:port of each worker group's leader known at the start
    host: str
    port: int
    max_num_seqs: int
    max_num_batched_tokens: int
    long_prefill_token_threshold: int
    enable_prefix_caching: bool
    lookahead: int  # steps planned before the running step's result is known
    step_timeout_s: float  # a longer step means a hung worker, unless long by measure
    heartbeat_timeout_s: float = 3.0  # a worker silent for this long is lost
    target_itl_ms: float | None = None  # of the steps in which rows decode; None: no target
    max_grant: int = 8  # most decode steps per frame; 0 or 1: no grants
    speculative_config: SpeculationOptions | None = None  # None: nothing is drafted
    state_check_interval: int = 64  # in steps; 0: never check the worker's state
    policy: Policy = Policy.FAIR
    cache_policy: CachePolicy = CachePolicy.LRU
    preemption: Preemption = Preemption.RECOMPUTE
    priority_ageing_s: float = 60.0
    tenant_weights: tuple[tuple[str, float], ...] = ()
    queue_window: int = 4
    max_overtakes: int = 16
    max_waiting_requests: int = 0
    max_waiting_tokens: int = 0
    max_waiting_requests_per_tenant: int = 0
    max_waiting_tokens_per_tenant: int = 0
    metrics_tenants: int = 0  # tenants that metrics name
    write_timeout_s: float = 60.0
    record: RecordOptions | None = None
    kv_events: KvEventOptions | None = None  # None: nothing is published
    drain_timeout_s: float = 60.0  # that running requests have after SIGTERM
    worker_dns: tuple[str, ...] = ()  # name:port, each of whose addresses is a worker group
    worker_dns_period_s: float = 2.0  # between two lookups
    accept_registrations: bool = False
    registration_lease_s: float = 15.0
    standby_delay_s: float | None = None  # of one of several schedulers; None: it is the only one
    identity: IdentityOptions = field(default_factory=IdentityOptions)
    logs: LoggingOptions = field(default_factory=LoggingOptions)
    log_steps: bool = False
    tracing: TracingOptions = field(default_factory=TracingOptions)

    def __post_init__(self) -> None:
        self.identity.check_host(self.host)
        self._check_workers()
        if not 0 <= self.max_grant <= MAX_GRANT:
            raise ValueError(f"max_grant is {self.max_grant}, must be 0 to {MAX_GRANT}")
        if self.lookahead not in (0, 1, 2):
            raise ValueError(f"lookahead is {self.lookahead}, must be 0, 1 or 2")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) is below max_num_seqs "
                f"({self.max_num_seqs})"
            )
        for name in (
            "step_timeout_s",
            "heartbeat_timeout_s",
            "priority_ageing_s",
            "write_timeout_s",
            "worker_dns_period_s",
            "registration_lease_s",
        ):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}, must be positive")
        if self.target_itl_ms is not None and not 0 < self.target_itl_ms < math.inf:
            raise ValueError(f"target_itl_ms is {self.target_itl_ms}, must be positive")
        if self.standby_delay_s is not None and not 0 < self.standby_delay_s < math.inf:
            raise ValueError(f"standby_delay_s is {self.standby_delay_s}, must be positive")
        if self.standby_delay_s is not None and self.accept_registrations:
            raise ValueError(
                "standby_delay_s and accept_registrations exclude each other: a worker registers "
                "with one scheduler, so the others would not know it; use --worker-dns"
            )
        if not 0 <= self.drain_timeout_s < math.inf:
            raise ValueError(f"drain_timeout_s is {self.drain_timeout_s}, must not be negative")
        for name in _NOT_NEGATIVE:
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}, must not be negative")

    def _check_workers(self) -> None:
        may_find_some = self.worker_dns or self.accept_registrations
        if not (self.workers or may_find_some) or len(set(self.workers)) < len(self.workers):
            raise ValueError(f"worker is {', '.join(self.workers)}; name each once")
        if len(set(self.worker_dns)) < len(self.worker_dns):
            raise ValueError(f"worker_dns is {', '.join(self.worker_dns)}; name each once")
        for name in self.worker_dns:
            check_address("worker_dns", name)


def check_address(name: str, address: str) -> None:
    """Raises ValueError, naming the option or field, unless the address is HOST:PORT."""
    host, _, port = address.rpartition(":")
    is_port = port.isascii() and port.isdecimal() and 0 < int(port) <= MAX_PORT
    if not host or not is_port or len(address) > MAX_ADDRESS_CHARS or not address.isprintable():
        raise ValueError(f"{name}: {address[:MAX_ADDRESS_CHARS]!r} is not HOST:PORT")


def parse(arguments: list[str] | None = None) -> ServiceConfig:
    """The configuration of this process; exits with a usage message on an invalid option."""
    parser = make_parser()
    options = sources.parse(parser, arguments, "scheduler")
    options["worker_dns"] = tuple(options["worker_dns"])
    may_find_some = options["worker_dns"] or options["accept_registrations"]
    options["workers"] = tuple(options.get("workers", [] if may_find_some else [DEFAULT_WORKER]))
    options["tenant_weights"] = tuple(options["tenant_weights"])
    if options["max_waiting_requests"] is None:
        most_running = options["max_num_seqs"]
        options["max_waiting_requests"] = max(LEAST_WAITING, WAITING_PER_SEQ * most_running)
    try:
        options["speculative_config"] = take_speculation(options)
        options["record"] = take_record_options(options)
        options["kv_events"] = take_kv_events(options)
        options["identity"] = take_identity(options)
        options["logs"], options["tracing"] = take_logging(options), take_tracing(options)
        return ServiceConfig(**options)
    except ValueError as error:
        parser.error(str(error))


def make_parser() -> argparse.ArgumentParser:
    """The parser of all options."""
    parser = argparse.ArgumentParser(
        prog="python -m scheduler_svc",
        description="Queues, places and runs requests on worker groups.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    sources.add_config(parser)
    _add_addresses(parser)
    _add_standby_option(parser)
    _add_step_options(parser)
    add_speculation_option(parser)
    _add_detection_options(parser)
    _add_policy_options(parser)
    _add_cache_policy_option(parser)
    _add_admission_options(parser)
    add_record_options(parser)
    add_kv_events_option(parser)
    _add_metrics_options(parser)
    add_logging_options(parser)
    parser.add_argument("--log-steps", action="store_true", help="log one line for each step")
    add_tracing_options(parser)
    add_server_options(parser)
    add_peer_options(parser, serves=True, calls=True)
    return parser


def _add_addresses(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--worker",
        dest="workers",
        action="append",
        default=argparse.SUPPRESS,
        metavar="HOST:PORT",
        help=f"a worker group's leader; may be repeated (default: {DEFAULT_WORKER}, or none with "
        "--worker-dns or --accept-registrations)",
    )
    parser.add_argument(
        "--worker-dns",
        action="append",
        default=[],
        metavar="NAME:PORT",
        help="a name that is looked up again and again: each of its addresses is a worker group, "
        "added and drained as the answers say; may be repeated",
    )
    parser.add_argument(
        "--worker-dns-period-s",
        type=float,
        default=2.0,
        help="seconds between two lookups of a name",
    )
    parser.add_argument(
        "--accept-registrations",
        action="store_true",
        help="workers started with --register may announce themselves here",
    )
    parser.add_argument(
        "--registration-lease-s",
        type=float,
        default=15.0,
        help="seconds after which a worker that neither renews its registration nor is attached "
        "counts as gone",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=50052, help="port to listen on")
    parser.add_argument(
        "--drain-timeout-s",
        type=float,
        default=60.0,
        help="seconds that running requests have after SIGTERM; what is left then, gateways submit "
        "to the next scheduler",
    )


def _add_standby_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--standby-delay-s",
        type=float,
        metavar="SECONDS",
        help="this is one of several schedulers for the same workers: stand by, and take them when "
        "no other has had them for so long; by default it is the only one",
    )


def _add_step_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--max-num-seqs", type=int, default=256, help="most running requests")
    parser.add_argument(
        "--max-num-batched-tokens", type=int, default=2048, help="most tokens of one step"
    )
    parser.add_argument(
        "--long-prefill-token-threshold",
        type=int,
        default=0,
        help="most prompt tokens of one request in a step; 0 is no limit",
    )
    parser.add_argument(
        "--target-itl-ms",
        type=float,
        metavar="MS",
        help="time between tokens to keep while prompts arrive: a step in which rows decode gets "
        "only so many prompt tokens, by measure, as let it end in time, and at least 32",
    )
    parser.add_argument(
        "--no-prefix-caching",
        dest="enable_prefix_caching",
        action="store_false",
        help="disable the prefix cache: compute every prompt in full",
    )
    parser.add_argument(
        "--lookahead",
        type=int,
        default=1,
        help="steps planned before the running step's result is known: 0, 1 or 2; one more hides "
        "network latency between steps under 2 ms, but a request that ends computes one more token",
    )
    parser.add_argument(
        "--max-grant",
        type=int,
        default=8,
        help="most decode steps sent to a worker at once while only decoding is to be done; 0 or 1 "
        "is one at a time",
    )


def _add_detection_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--state-check-interval",
        type=int,
        default=64,
        help="compare the worker's slots with the scheduler's after this many steps; 0 is never",
    )
    parser.add_argument(
        "--step-timeout-s",
        type=float,
        default=10.0,
        help="seconds after which a step counts as hung and the worker as lost; ten times the "
        "expected duration where that is longer (measured here or rehearsed at the worker's "
        "start); at least 60 before any step was measured",
    )
    parser.add_argument(
        "--heartbeat-timeout-s",
        type=float,
        default=3.0,
        help="seconds without a message after which a worker counts as lost; up to five times as "
        "long for one whose heartbeats come late",
    )


def _add_metrics_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--metrics-tenants",
        type=int,
        default=0,
        metavar="N",
        help="metrics count requests and tokens of the first N tenants by name, and those of all "
        "others together (0: of no tenant)",
    )


def _add_policy_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--policy",
        type=Policy,
        default=Policy.FAIR.value,
        metavar="{fcfs,priority,fair}",
        help="scheduling policy: first come first served, by priority, or fair share between "
        "tenants, which is the first of these where all are one tenant",
    )
    parser.add_argument(
        "--preemption",
        type=Preemption,
        default=Preemption.RECOMPUTE.value,
        metavar="{recompute,swap}",
        help="what happens to the KV of a preempted request: it is dropped and computed again, or "
        "copied to the worker's host blocks while they last",
    )
    parser.add_argument(
        "--priority-ageing-s",
        type=float,
        default=60.0,
        help="seconds of waiting that count as one priority level",
    )
    parser.add_argument(
        "--tenant-weight",
        dest="tenant_weights",
        type=_tenant_weight,
        action="append",
        default=[],
        metavar="NAME=WEIGHT",
        help="a tenant's weight in the fair share, by default 1; may be repeated",
    )
    parser.add_argument(
        "--queue-window",
        type=int,
        default=4,
        help="requests tried after a waiting request that has no room",
    )
    parser.add_argument(
        "--max-overtakes",
        type=int,
        default=16,
        help="times that a waiting request may be overtaken this way",
    )


def _add_cache_policy_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cache-policy",
        type=CachePolicy,
        default=CachePolicy.LRU.value,
        metavar="{lru,sessions}",
        help="which cached prefixes are kept when room is short: those used last, or by sessions "
        "those that waiting requests will read, which then enter by how little they lack",
    )


def _add_admission_options(parser: argparse.ArgumentParser) -> None:
    for what in ("requests", "tokens"):
        for suffix, whose in (("", "in total"), ("-per-tenant", "per tenant")):
            is_bounded = (what, suffix) == ("requests", "")
            default = f"; by default {WAITING_PER_SEQ} x --max-num-seqs, at least {LEAST_WAITING}"
            parser.add_argument(
                f"--max-waiting-{what}{suffix}",
                type=int,
                default=None if is_bounded else 0,
                help=f"most waiting {what} {whose}; more are refused; 0 is no limit"
                + default * is_bounded,
            )
    parser.add_argument(
        "--write-timeout-s",
        type=float,
        default=60.0,
        help="seconds after which a client that does not read its stream is left",
    )


def _tenant_weight(text: str) -> tuple[str, float]:
    name, equals, weight = text.rpartition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=WEIGHT")
    value = float(weight)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"the weight of {name!r} is {value}, must be positive")
    return name, value
