"""`pagewire explain`: time that a request spent per phase, and per reason to wait.

A gateway knows the whole way of the first token, the scheduler all but the gateway's part of it.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from google.protobuf import json_format

from pagewire._channel import DEFAULT_SCHEDULER, Connection, open_channel
from pagewire._errors import (
    PermissionDenied,
    Unauthenticated,
    Unavailable,
    Unimplemented,
    translated,
)
from pagewire._terminal import Style, bar
from pagewire.cli.options import (
    add_command,
    add_connection,
    add_scheduler,
    to_connection,
    to_scheduler,
)
from pagewire.cli.status import ASK_TIMEOUT_S
from pagewire.v1 import debug_pb2
from pagewire.v1.debug_pb2_grpc import DebugServiceStub

if TYPE_CHECKING:
    from pagewire.cli.options import Subparsers

_PHASES = {
    "queue_s": "queue",
    "prefill_s": "prefill",
    "decode_s": "decode",
    "preempted_s": "preempted",
    "worker_away_s": "worker away",
}


def add_parser(commands: "Subparsers") -> None:
    """Adds the command."""
    parser = add_command(
        commands, "explain", "Show where the time of a live or recently ended request went."
    )
    add = parser.add_argument
    add("request_id", metavar="REQUEST_ID", help="from the answer, or the header x-request-id")
    add("--json", action="store_true", help="one JSON line instead of a table")
    add_scheduler(parser)
    add_connection(parser)
    parser.set_defaults(run=run, scheduler=None)  # without it, the gateway is asked


def run(options: argparse.Namespace) -> int:
    """Prints the explanation."""
    answer = _ask(options)
    fields = json_format.MessageToDict(answer, preserving_proto_field_name=True)
    text = json.dumps(fields) if options.json else as_text(answer, Style(sys.stdout))
    sys.stdout.write(text + "\n")
    return 0


def _ask(options: argparse.Namespace) -> debug_pb2.ExplainResponse:
    """The gateway's answer; the scheduler's where the gateway has none, or where it is named."""
    if options.scheduler is None:
        with suppress(Unavailable, Unimplemented, Unauthenticated, PermissionDenied):
            return _explained(options.request_id, to_connection(options))
        options.scheduler = DEFAULT_SCHEDULER
    return _explained(options.request_id, to_scheduler(options))


def _explained(request_id: str, connection: Connection) -> debug_pb2.ExplainResponse:
    request = debug_pb2.ExplainRequest(request_id=request_id)
    with open_channel(connection) as channel, translated(connection.target):
        return DebugServiceStub(channel).Explain(request, **connection.terms(ASK_TIMEOUT_S))


def as_text(answer: debug_pb2.ExplainResponse, style: Style) -> str:
    """A table: the phases, then the reasons to wait."""
    wall_s = answer.wall_s or 1e-9
    lines = [
        f"{style.bold(answer.request_id)}  {answer.state}, {answer.wall_s:.3f} s, "
        f"{answer.num_prompt_tokens} prompt tokens ({answer.num_cached_tokens} cached), "
        f"{answer.num_output_tokens} output tokens, preempted {answer.num_preemptions} times"
    ]
    if answer.message:
        lines.append(style.red(answer.message))
    for field, name in _PHASES.items():
        seconds = getattr(answer.time_spent, field)
        if seconds:
            share = seconds / wall_s
            lines.append(f"  {name:<12}{seconds:9.3f} s {share:7.1%}  {style.cyan(bar(share))}")
    if answer.waits:
        lines.append("waited")
        lines += [f"  {wait.seconds:21.3f} s  {wait.reason}" for wait in answer.waits]
    lines += _first_token(answer.first_token, style)
    return "\n".join(lines)


def _first_token(path: Sequence[debug_pb2.PathStage], style: Style) -> Iterator[str]:
    """Its way, a line for each part; nothing without one."""
    in_all_s = sum(stage.seconds for stage in path)
    if path:
        yield f"first token after {in_all_s * 1e3:.2f} ms"
    for stage in path:
        share = stage.seconds / (in_all_s or 1e-9)
        took = f"{stage.seconds * 1e3:9.3f} ms {share:7.1%}"
        yield f"  {stage.service:<10}{took}  {style.cyan(f'{bar(share):<20}')}  {stage.name}"
