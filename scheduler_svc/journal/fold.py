"""`python -m scheduler_svc.journal.fold FOLDER`: cuts off a recording's oldest segment.

It replays that segment and writes what the core has become as the snapshot of the next one. Runs
beside the scheduler that records, with the lowest priority.
"""

import os
import sys
from pathlib import Path

from pagewire.v1.journal_pb2 import JournalRecord
from scheduler_svc.journal import records, segments, values
from scheduler_svc.journal.recording import NotReplayable, Recording
from scheduler_svc.journal.replay import play


def fold(folder: Path) -> None:
    """Turns the oldest segment into a snapshot. Raises NotReplayable when it does not replay."""
    oldest, *later = segments.numbers(folder)
    if not later:
        raise NotReplayable(f"{folder} has a single segment, which is being written")
    recording = Recording(segments.segment_path(folder, oldest))
    core = recording.restore()
    divergence = play(recording, core, num_segments=1).divergence
    if divergence is not None:
        raise NotReplayable(str(divergence))
    target = segments.snapshot_path(folder, later[0])
    partial = target.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    with segments.create(partial) as file:
        file.write(records.pack(JournalRecord(snapshot=values.encode(core))))
    partial.rename(target)
    segments.segment_path(folder, oldest).unlink()
    segments.snapshot_path(folder, oldest).unlink(missing_ok=True)


def main() -> int:
    """Entry point; returns the exit code."""
    os.nice(19)
    try:
        fold(Path(sys.argv[1]))
    except (NotReplayable, records.Damaged, values.BadValues, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
