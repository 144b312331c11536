"""`pagewire profile`: where the time of the next steps goes, as a file that Perfetto opens.

The scheduler answers for its workers, too, with all times on its own clock.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagewire._channel import open_channel
from pagewire._errors import translated
from pagewire.cli.options import add_command, add_connection, add_scheduler, to_scheduler
from pagewire.v1 import debug_pb2
from pagewire.v1.debug_pb2_grpc import DebugServiceStub

if TYPE_CHECKING:
    from pagewire.cli.options import Subparsers

DEFAULT_OUT = Path("pagewire-trace.json")
MARGIN_S = 30.0  # for the answer after the recording
MAX_STEPS = 1000

Event = dict[str, Any]


def add_parser(commands: "Subparsers") -> None:
    """Adds the command."""
    parser = add_command(
        commands, "profile", "Record the next steps of scheduler and workers for Perfetto."
    )
    add = parser.add_argument
    add("--steps", type=int, default=50, help=f"steps to record, at most {MAX_STEPS}")
    add("--out", type=Path, default=DEFAULT_OUT, metavar="FILE", help="Chrome trace to write")
    add("--kernels", action="store_true", help="with each kernel that a GPU runs")
    add("--wait-s", type=float, default=60.0, help="seconds to wait for so many steps")
    add_scheduler(parser)
    add_connection(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Records, and writes the file."""
    connection = to_scheduler(options)
    request = debug_pb2.ProfileStepsRequest(
        steps=_checked_steps(options.steps), kernels=options.kernels, timeout_s=options.wait_s
    )
    with open_channel(connection) as channel, translated(options.scheduler):
        answer = DebugServiceStub(channel).ProfileSteps(
            request, **connection.terms(options.wait_s + MARGIN_S)
        )
        messages = list(answer)
    intervals = [interval for message in messages for interval in message.intervals]
    last = messages[-1]
    options.out.write_text(json.dumps(to_chrome(intervals, last)), encoding="utf-8")
    sys.stdout.write(
        f"{options.out}: {last.num_steps} steps, {len(intervals)} intervals; open it at "
        f"ui.perfetto.dev or chrome://tracing\n"
        f"times of workers are at most {last.clock_error_ns / 1e3:.0f} us off\n"
    )
    if last.num_left_out:
        sys.stdout.write(f"{last.num_left_out} kernels were left out\n")
    if last.num_steps < options.steps:
        sys.stderr.write(
            f"pagewire: warning: only {last.num_steps} of {options.steps} steps came within "
            f"{options.wait_s:g} s\n"
        )
    return 0


def _checked_steps(steps: int) -> int:
    if not 1 <= steps <= MAX_STEPS:
        raise ValueError(f"--steps: {steps} is outside [1, {MAX_STEPS}]")
    return steps


def to_chrome(
    intervals: Iterable[debug_pb2.ProfileInterval], last: debug_pb2.ProfileStepsResponse
) -> dict[str, Any]:
    """The intervals as a Chrome trace, in microseconds since the first of them.

    Services are its processes, tracks its threads. An interval comes before those in it.
    """
    found = sorted(intervals, key=lambda i: (i.begin_ns, -i.duration_ns))
    origin_ns = found[0].begin_ns if found else 0
    services: dict[str, int] = {}
    tracks: dict[tuple[str, str], int] = {}
    events: list[Event] = []
    for interval in found:
        process = services.setdefault(interval.service, len(services) + 1)
        thread = tracks.setdefault((interval.service, interval.track), len(tracks) + 1)
        details = {
            "step": interval.step_id,
            "tokens": interval.num_tokens,
            "decode_rows": interval.num_decode_rows,
        }
        events.append(
            {
                "ph": "X",
                "name": interval.name,
                "cat": interval.service.split()[0],
                "pid": process,
                "tid": thread,
                "ts": (interval.begin_ns - origin_ns) / 1e3,
                "dur": interval.duration_ns / 1e3,
                "args": {name: value for name, value in details.items() if value},
            }
        )
    names = [*_names(services, tracks)]
    other = {"steps": last.num_steps, "clock_error_us": last.clock_error_ns / 1e3}
    return {"traceEvents": names + events, "displayTimeUnit": "ms", "otherData": other}


def _names(services: dict[str, int], tracks: dict[tuple[str, str], int]) -> Iterator[Event]:
    for service, process in services.items():
        yield _name("process_name", service, process)
    for (service, track), thread in tracks.items():
        yield _name("thread_name", track, services[service], thread)


def _name(kind: str, name: str, process: int, thread: int = 0) -> Event:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}
