"""Reads a recording: the core it begins with, and its events from there on."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from pagewire.v1.journal_pb2 import JournalEvent, JournalHeader
from scheduler_svc import core as core_package
from scheduler_svc.core import Scheduler, SchedulerConfig
from scheduler_svc.journal import records, segments, values

FORMAT_VERSION = 3


class NotReplayable(Exception):
    """Raised when a recording is missing, incomplete or of another version, as the message says."""


@cache
def core_sha256() -> str:
    """SHA-256 of the core's sources: a recording is read by the version that wrote it."""
    digest = hashlib.sha256()
    for folder in core_package.__path__:
        for path in sorted(Path(folder).rglob("*.py")):
            name = path.relative_to(folder).as_posix()
            digest.update(name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Event:
    """An event and the file that it is from."""

    event: JournalEvent
    path: Path


class Recording:
    """The segments of one recording, from a given one or the oldest on."""

    def __init__(self, path: Path) -> None:
        """`path` is a segment, a recording's folder, or a folder with a single recording.

        Raises NotReplayable, or records.Damaged.
        """
        self.folder, self._first = _locate(path)
        last = segments.numbers(self.folder)[-1]
        self._segments = range(self._first, last + 1)
        self.header = self._header_of(self._first)

    @property
    def config(self) -> SchedulerConfig:
        """The core's configuration. Raises BadValues."""
        config = values.decode(self.header.config)
        assert isinstance(config, SchedulerConfig)
        return config

    @property
    def is_complete(self) -> bool:
        """True if it starts with the very first event."""
        return self._first == 1

    def restore(self) -> Scheduler:
        """The core as it was before the first event. Raises NotReplayable."""
        if self.is_complete:
            return Scheduler(self.config)
        path = segments.snapshot_path(self.folder, self._first)
        if not path.is_file():
            raise NotReplayable(
                f"segment {self._first} of {self.folder} has no snapshot: begin with the first"
            )
        if self.header.core_sha256 != core_sha256():
            raise NotReplayable(
                f"{path} was written by another version of the scheduler's core; only a recording "
                "from its first segment on can be replayed by this one"
            )
        stored = next(records.read(path), None)
        if stored is None or not stored.record.HasField("snapshot"):
            raise NotReplayable(f"{path} holds no snapshot")
        scheduler = values.decode(stored.record.snapshot)
        assert isinstance(scheduler, Scheduler)
        return scheduler

    def events(self, num_segments: int | None = None) -> Iterator[Event]:
        """The events in order, checked to have no gaps. Raises NotReplayable or Damaged."""
        expected = self.header.first_event
        for number in self._segments[:num_segments]:
            header = self._header_of(number)
            if header.first_event != expected:
                raise NotReplayable(
                    f"segment {number} of {self.folder} begins with event {header.first_event}, "
                    f"the one before it ends with {expected - 1}"
                )
            path = segments.segment_path(self.folder, number)
            for stored in records.read(path):
                if not stored.record.HasField("event"):
                    continue
                event = stored.record.event
                if event.number != expected:
                    raise records.Damaged(
                        f"{path} at byte {stored.offset}: event {event.number} follows "
                        f"{expected - 1}"
                    )
                expected += 1
                yield Event(event, path)

    def _header_of(self, number: int) -> JournalHeader:
        path = segments.segment_path(self.folder, number)
        try:
            stored = next(records.read(path), None)
        except FileNotFoundError:
            raise NotReplayable(f"segment {number} of {self.folder} is missing") from None
        if stored is None or not stored.record.HasField("header"):
            raise NotReplayable(f"{path} has no header")
        header = stored.record.header
        if header.format_version != FORMAT_VERSION:
            raise NotReplayable(
                f"{path} has format {header.format_version}, this version reads {FORMAT_VERSION}"
            )
        return header


def _locate(path: Path) -> tuple[Path, int]:
    """The folder of a recording and the number of the first segment to read."""
    if path.is_file():
        if path.suffix != segments.SUFFIX or not path.stem.isdecimal():
            raise NotReplayable(f"{path} is no segment of a recording (*{segments.SUFFIX})")
        return path.parent, int(path.stem)
    if not path.is_dir():
        raise NotReplayable(f"{path} does not exist")
    if found := segments.numbers(path):
        return path, found[0]
    recordings = list(segments.recordings(path))
    if len(recordings) != 1:
        names = "".join(f"\n  {folder}" for folder in recordings)
        raise NotReplayable(
            f"{path} holds {len(recordings)} recordings; name the one to replay:{names}"
            if recordings
            else f"{path} holds no recording"
        )
    return recordings[0], segments.numbers(recordings[0])[0]
