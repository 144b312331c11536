"""`python -m scheduler_svc.journal.fold FOLDER BYTES`: cuts off a recording's oldest segments.

It replays them and writes the resulting core as the snapshot of the first segment that is kept. It
runs as a process next to the recording scheduler, at a lower priority.
"""

import os
import sys
from pathlib import Path

from pagewire.v1.journal_pb2 import JournalRecord
from scheduler_svc.core import Scheduler
from scheduler_svc.journal import records, segments, values
from scheduler_svc.journal.recording import NotReplayable, Recording
from scheduler_svc.journal.replay import play

_NICENESS = 5


def fold(folder: Path, most_bytes: int) -> None:
    """Leaves at most `most_bytes` of events. Raises NotReplayable when they do not replay."""
    oldest, kept = segments.numbers(folder)[0], _first_kept(folder, most_bytes)
    if kept == oldest:
        return
    recording = Recording(segments.segment_path(folder, oldest))
    core = recording.restore()
    divergence = play(recording, core, num_segments=kept - oldest).divergence
    if divergence is not None:
        raise NotReplayable(str(divergence))
    _write_snapshot(core, segments.snapshot_path(folder, kept))
    for number in range(oldest, kept):
        segments.segment_path(folder, number).unlink()
        segments.snapshot_path(folder, number).unlink(missing_ok=True)


def _first_kept(folder: Path, most_bytes: int) -> int:
    """The oldest segment to keep; the newest is being written and is always kept."""
    *_, newest = numbers = segments.numbers(folder)
    total = 0
    for number in reversed(numbers):
        total += segments.segment_path(folder, number).stat().st_size
        if total > most_bytes and number != newest:
            return number + 1
    return numbers[0]


def _write_snapshot(core: Scheduler, target: Path) -> None:
    partial = target.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    with segments.create(partial) as file:
        file.write(records.pack(JournalRecord(snapshot=values.encode(core))))
    partial.rename(target)


def main() -> int:
    """Entry point; returns the exit code."""
    os.nice(_NICENESS)
    try:
        fold(Path(sys.argv[1]), int(sys.argv[2]))
    except (NotReplayable, records.Damaged, values.BadValues, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
