"""`pagewire status`: the state of the three services, once or repeatedly."""

import argparse
import json
import sys
import time
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING

from google.protobuf.message import Message

from pagewire._channel import Connection, open_channel
from pagewire._errors import PagewireError, translated
from pagewire._terminal import Style, bar, is_terminal
from pagewire.cli import health
from pagewire.cli.health import Health
from pagewire.cli.options import (
    add_command,
    add_connection,
    add_scheduler,
    to_connection,
    to_scheduler,
)
from pagewire.cli.token_rate import TokenRate, rate_now
from pagewire.v1 import inference_pb2, scheduler_pb2
from pagewire.v1.inference_pb2_grpc import InferenceServiceStub
from pagewire.v1.scheduler_pb2_grpc import SchedulerServiceStub

if TYPE_CHECKING:
    from pagewire.cli.options import Subparsers

ASK_TIMEOUT_S = 2.0
SHOWN_SESSIONS = 8  # of each worker group
HOME_AND_CLEAR = "\x1b[H\x1b[2J"


def add_parser(commands: "Subparsers") -> None:
    """Adds the command."""
    parser = add_command(
        commands, "status", "Show queue, KV cache and readiness; exits with 1 unless all is ready."
    )
    add = parser.add_argument
    add_scheduler(parser)
    add("--worker", metavar="HOST:PORT", help="its address (default: the scheduler's)")
    add("--watch", type=float, nargs="?", const=1.0, metavar="SECONDS", help="repeat until Ctrl-C")
    add("--json", action="store_true", help="one JSON line instead of a table")
    add_connection(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Prints one report, or one every `--watch` seconds."""
    gateway, scheduler = to_connection(options), to_scheduler(options)
    before: scheduler_pb2.GetStatusResponse | None = None
    while True:
        report = ask(gateway, scheduler, options.worker, before)
        before = report.status
        text = json.dumps(report.as_json()) if options.json else report.as_text(Style(sys.stdout))
        if options.watch is not None and is_terminal(sys.stdout) and not options.json:
            sys.stdout.write(HOME_AND_CLEAR)
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
        if options.watch is None:
            return 0 if report.is_ready else 1
        time.sleep(max(options.watch, 0.1))


def ask(
    gateway: Connection,
    inside: Connection,
    worker: str | None,
    before: scheduler_pb2.GetStatusResponse | None = None,
) -> "Report":
    """Queries all three services; missing answers are part of the report.

    `before` is an earlier status, since which tokens per second are counted.
    """
    status: scheduler_pb2.GetStatusResponse | None = None
    rate: TokenRate | None = None
    try:
        with open_channel(inside) as channel, translated(inside.target):
            get = partial(_get_status, SchedulerServiceStub(channel), inside)
            status, rate = rate_now(get(), get, before)
    except PagewireError as error:
        scheduler_health = Health(is_serving=False, reason=str(error))
    else:
        scheduler_health = Health(status.ready, status.reason)
    services = {
        f"gateway {gateway.target}": health.check(replace(gateway, api_key=None)),
        f"scheduler {inside.target}": scheduler_health,
    }
    addresses = [worker] if worker else _workers(status)
    for address in addresses:
        answer = health.check(replace(inside, target=address, api_key=None))
        services[f"worker {address}"] = _as_group(answer, address, status)
    return Report(services, status, _sampling_defaults(gateway), rate)


def _sampling_defaults(gateway: Connection) -> dict[str, float]:
    """The gateway's values of fields that a request leaves out; empty if it does not say."""
    try:
        with open_channel(gateway) as channel, translated(gateway.target):
            answer = InferenceServiceStub(channel).ListModels(
                inference_pb2.ListModelsRequest(), **gateway.terms(ASK_TIMEOUT_S)
            )
    except PagewireError:
        return {}
    return {field.name: value for field, value in answer.sampling_defaults.ListFields()}


def _get_status(stub: SchedulerServiceStub, inside: Connection) -> scheduler_pb2.GetStatusResponse:
    request = scheduler_pb2.GetStatusRequest(most_sessions=SHOWN_SESSIONS)
    return stub.GetStatus(request, **inside.terms(ASK_TIMEOUT_S))


def _as_group(
    answer: Health, address: str, status: scheduler_pb2.GetStatusResponse | None
) -> Health:
    """A worker's own answer, unless the scheduler says why it gives it no requests."""
    for group in () if status is None else status.groups:
        if group.address == address and group.draining:
            return Health(is_serving=False, reason=f"drained: {group.draining}")
        if group.address == address and answer.is_serving and not group.ready:
            return Health(is_serving=False, reason=group.reason)
    return answer


def _workers(status: scheduler_pb2.GetStatusResponse | None) -> list[str]:
    if status is None:
        return []
    # A scheduler of an older version has one worker and no groups.
    found = [group.address for group in status.groups] or [status.worker_address]
    return [address for address in found if address]


class Report:
    """Answers of the services, as text or JSON."""

    def __init__(
        self,
        services: dict[str, Health],
        status: scheduler_pb2.GetStatusResponse | None,
        sampling_defaults: dict[str, float],
        rate: TokenRate | None = None,
    ) -> None:
        self._sampling_defaults = sampling_defaults
        self._services = services
        self._status = status
        self._rate = rate

    @property
    def status(self) -> scheduler_pb2.GetStatusResponse | None:
        """The scheduler's answer."""
        return self._status

    @property
    def is_ready(self) -> bool:
        """True if gateway, scheduler and at least one worker are serving."""
        kinds = {name.split()[0] for name, answer in self._services.items() if answer.is_serving}
        return kinds == {"gateway", "scheduler", "worker"}

    def as_json(self) -> dict[str, object]:
        """Field names as in the proto."""
        services: dict[str, object] = {}
        for name, answer in self._services.items():
            kind, address = name.split()
            number = sum(key.partition("_")[0] == kind for key in services) + 1
            services[kind if number == 1 else f"{kind}_{number}"] = {
                "address": address,
                "ready": answer.is_serving,
                "reason": answer.reason,
            }
        scheduler = None if self._status is None else _fields(self._status)
        rate = None if self._rate is None else asdict(self._rate)
        return {
            "ready": self.is_ready,
            "services": services,
            "scheduler": scheduler,
            "tokens_per_s": rate,
            "sampling_defaults": self._sampling_defaults,
        }

    def as_text(self, style: Style) -> str:
        """A table with at most one line per service."""
        lines = []
        for name, answer in self._services.items():
            word = style.green("ready") if answer.is_serving else style.red("not ready")
            service, address = name.split()
            lines.append(f"{service:<11}{address:<22} {word}  {style.dim(answer.reason)}".rstrip())
        if self._status is not None:
            lines += [f"{name:<11}{text}" for name, text in _rows(self._status, self._rate, style)]
        if self._sampling_defaults:
            values = ", ".join(f"{n} {v:g}" for n, v in self._sampling_defaults.items())
            lines.append(f"{'sampling':<11}{values}, where a request leaves them out")
        return "\n".join(lines)


def _fields(message: Message) -> dict[str, object]:
    """A message as JSON; not MessageToDict, which writes 64-bit numbers as strings."""
    found: dict[str, object] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.message_type is None:
            found[field.name] = list(value) if field.is_repeated else value
        elif field.is_repeated:
            found[field.name] = [_fields(entry) for entry in value]
        else:
            found[field.name] = _fields(value)
    return found


def _now(rate: TokenRate) -> str:
    return f"{rate.output:.1f} delivered, {rate.prefill:.1f} prefilled now"


def _rows(
    status: scheduler_pb2.GetStatusResponse, rate: TokenRate | None, style: Style
) -> list[tuple[str, str]]:
    model, used = status.model, status.num_blocks - status.num_free_blocks
    usage = used / status.num_blocks if status.num_blocks else 0.0
    queried = status.prefix_query_tokens
    hit_rate = status.prefix_hit_tokens / queried if queried else 0.0
    return [
        (
            "model",
            f"{model.model} ({model.architecture}, {model.dtype}, {model.max_model_len} tokens)",
        ),
        *([("device", f"{model.dtype} on {status.device}")] if status.device else []),
        *([("weights", model.quantization)] if model.quantization not in ("", "none") else []),
        *([("attention", status.attention_backend)] if status.attention_backend else []),
        *([("sums", status.all_reduce)] if status.all_reduce else []),
        (
            "requests",
            f"{status.num_running} of {status.max_num_seqs} running, {status.num_waiting} waiting "
            f"({status.num_waiting_tokens} tokens), {status.num_finished} finished",
        ),
        (
            "KV cache",
            f"{style.cyan(bar(usage))} {usage:.1%}, {used} of {status.num_blocks} blocks "
            f"of {status.block_size} tokens" + _in_type(status),
        ),
        ("prefix", f"{hit_rate:.1%} of {queried} prompt tokens found in the cache"),
        *_tier(status),
        ("preempted", f"{status.num_preemptions} times{_waiting_again(status)}"),
        (
            "tokens",
            f"{status.num_output_tokens} delivered, {status.num_prefill_tokens} prefilled",
        ),
        *([] if rate is None else [("tokens/s", _now(rate))]),
        ("steps", f"{status.num_steps} in {status.uptime_s:.0f} s, epoch {status.epoch}"),
        *_target(status),
        *_drafts(status),
        *_sessions(status),
    ]


def _waiting_again(status: scheduler_pb2.GetStatusResponse) -> str:
    return f", {status.num_preempted} requests wait to go on" if status.num_preempted else ""


def _in_type(status: scheduler_pb2.GetStatusResponse) -> str:
    kind = status.kv_cache_dtype
    return f" in {kind}" if kind and kind != status.model.dtype else ""


def _tier(status: scheduler_pb2.GetStatusResponse) -> list[tuple[str, str]]:
    tiers = (
        ("host tier", status.num_tier_cached_blocks, status.num_tier_blocks, "in host memory"),
        ("disk tier", status.num_disk_cached_blocks, status.num_disk_blocks, "on disk"),
    )
    return [
        (name, f"{num_held} of {num_blocks} blocks {where} hold prompts")
        for name, num_held, num_blocks, where in tiers
        if num_blocks
    ]


def _sessions(status: scheduler_pb2.GetStatusResponse) -> list[tuple[str, str]]:
    """A line for each session; none where the cache is not by sessions."""
    return [
        (
            "session",
            f"{one.session_id or 'without a name'}: {one.num_turns} "
            f"turn{'' if one.num_turns == 1 else 's'}, {one.num_cached_tokens} tokens cached, "
            f"{one.num_found_tokens / max(one.num_prompt_tokens, 1):.1%} of prompts found, "
            f"{one.state}" + (f" for {one.idle_s:.0f} s" if one.idle_s else ""),
        )
        for one in status.sessions
    ]


def _target(status: scheduler_pb2.GetStatusResponse) -> list[tuple[str, str]]:
    if not status.target_itl_ms:
        return []
    held_back = f"prompts held back in {status.num_capped_steps} steps"
    return [("target", f"{status.target_itl_ms:g} ms between tokens, {held_back}")]


def _drafts(status: scheduler_pb2.GetStatusResponse) -> list[tuple[str, str]]:
    if not status.speculation:
        return []
    drafted, accepted = status.num_drafted_tokens, status.num_accepted_tokens
    if not drafted:
        return [("drafts", f"none yet by {status.speculation}")]
    each = 1 + accepted / status.num_drafts
    rate = f"{accepted / drafted:.1%} of {drafted} tokens accepted"
    return [("drafts", f"{rate}, {each:.2f} tokens a step by {status.speculation}")]
