"""`python -m scheduler_svc.journal PATH`: replays a recording. `pagewire replay` runs this."""

import argparse
import asyncio
import sys
from pathlib import Path

from scheduler_svc.journal.calls import UnknownCall
from scheduler_svc.journal.recording import NotReplayable, Recording
from scheduler_svc.journal.records import Damaged
from scheduler_svc.journal.replay import ReplayReport, replay
from scheduler_svc.journal.values import BadValues
from scheduler_svc.journal.worker_replay import replay_on
from scheduler_svc.worker.link import LinkLost

_EQUAL, _DIVERGED, _FAILED = 0, 1, 2


def main(arguments: list[str] | None = None) -> int:
    """Entry point: returns 0 if all was equal, 1 if not, 2 if the recording cannot be replayed."""
    options = _parser().parse_args(arguments)
    try:
        report = _replay(options)
    except (NotReplayable, Damaged, BadValues, UnknownCall, LinkLost, OSError) as error:
        sys.stderr.write(f"cannot replay: {error}\n")
        return _FAILED
    for note in report.notes:
        sys.stdout.write(f"note: {note}\n")
    if report.divergence is not None:
        sys.stdout.write(f"DIVERGED after {report}\n{report.divergence}\n")
        return _DIVERGED
    same = "every token" if options.worker else "every plan"
    sys.stdout.write(f"replayed {report}: {same} is equal\n")
    return _EQUAL


def _replay(options: argparse.Namespace) -> ReplayReport:
    recording = Recording(options.path)
    if options.worker:
        return asyncio.run(
            replay_on(recording, options.worker, options.step_timeout_s, options.to_step)
        )
    return replay(recording, options.to_step)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pagewire replay",
        description="Replays what a scheduler recorded.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("path", type=Path, help="a recording's folder, or the segment to begin at")
    parser.add_argument("--worker", help="host:port of a worker to replay on; compares its tokens")
    parser.add_argument("--to-step", type=int, help="last step to replay")
    parser.add_argument("--step-timeout-s", type=float, default=60.0, help="timeout of one step")
    return parser


if __name__ == "__main__":
    sys.exit(main())
