"""`pagewire explain`: time that a request spent per phase, and per reason to wait."""

import argparse
import json
import sys
from typing import TYPE_CHECKING

from google.protobuf import json_format

from pagewire._channel import open_channel
from pagewire._errors import translated
from pagewire._terminal import Style, bar
from pagewire.cli.options import add_command, add_connection, add_scheduler, to_scheduler
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
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Prints the explanation."""
    connection = to_scheduler(options)
    with open_channel(connection) as channel, translated(options.scheduler):
        answer = DebugServiceStub(channel).Explain(
            debug_pb2.ExplainRequest(request_id=options.request_id),
            **connection.terms(ASK_TIMEOUT_S),
        )
    fields = json_format.MessageToDict(answer, preserving_proto_field_name=True)
    text = json.dumps(fields) if options.json else as_text(answer, Style(sys.stdout))
    sys.stdout.write(text + "\n")
    return 0


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
    return "\n".join(lines)
