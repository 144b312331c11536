"""Records the calls of a core. Serving never waits for it and never fails because of it.

The core's thread puts calls into a queue; the recorder's thread serializes and writes them. Any
failure there (a full disk, a value that cannot be written, a disk that is too slow) ends the
recording with a logged reason and has no other effect.
"""

import logging
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, BinaryIO

from pagewire.v1.journal_pb2 import JournalHeader, JournalRecord
from scheduler_svc.core import Refused
from scheduler_svc.journal import records, segments
from scheduler_svc.journal.events import Call, masked, to_event
from scheduler_svc.journal.mask import Mask

logger = logging.getLogger(__name__)

SWITCH_INTERVAL_S = 1e-4
_SEGMENTS = 16  # in a full recording
_EVENTS = f"*{segments.SUFFIX}"  # excludes the snapshot, which is as large as the core
_FOLD_FROM, _FOLD_TO = 0.75, 0.5  # fractions of the limit: cut off from, and down to
_CHECKS = 8  # checks of the room left per segment written
_MAX_QUEUED = 100_000  # calls; a disk this slow will not catch up
_SERVICE_FOLDER = Path(__file__).parents[2]


class Stopped(Exception):
    """Raised when the recording cannot continue; the message says why."""


@dataclass(frozen=True, slots=True)
class RecordingLimits:
    """Limits on the size of a recording."""

    max_bytes: int

    @property
    def segment_bytes(self) -> int:
        """Size at which a new segment begins."""
        return self.max_bytes // _SEGMENTS


class Recorder:
    """One recording, from the creation of a core until `close`; the core's thread calls `tap`.

    The recorder's thread competes with the core's for the interpreter: a recording process should
    set the switch interval to SWITCH_INTERVAL_S.
    """

    def __init__(
        self, folder: Path, header: JournalHeader, mask: Mask | None, limits: RecordingLimits
    ) -> None:
        """Starts a recording in a new folder. Raises OSError."""
        folder.mkdir(mode=0o700, parents=True)
        self.folder = folder
        self.why_stopped = ""
        self._claim = segments.Claim(folder)
        self._queue: SimpleQueue[Call | None] = SimpleQueue()
        self._writer = _Writer(folder, header, mask, limits)
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        self._thread.start()

    def tap(
        self, name: str, arguments: tuple[Any, ...], answer: Any, refused: Refused | None
    ) -> None:
        """Queues a call that has just happened."""
        if self.why_stopped:
            return
        if self._queue.qsize() >= _MAX_QUEUED:
            self._stop(f"{_MAX_QUEUED} calls wait to be written: the disk is too slow")
            return
        self._queue.put(Call(name, arguments, answer, refused))

    def close(self) -> None:
        """Writes the queued calls and ends the recording."""
        self._queue.put(None)
        self._thread.join()
        self._claim.release()

    def _run(self) -> None:
        try:
            while (call := self._queue.get()) is not None:
                if self.why_stopped:
                    continue
                self._writer.write(call)
                if self._queue.empty():
                    self._writer.flush()
        except Exception as error:  # requests are served whatever it is
            self._stop(str(error) or type(error).__name__, error)
        finally:
            self._writer.close()

    def _stop(self, why: str, error: Exception | None = None) -> None:
        self.why_stopped = why
        unforeseen = None if isinstance(error, Stopped | OSError) else error
        logger.error("recording to %s stops: %s", self.folder, why, exc_info=unforeseen)


class _Writer:
    """Writes calls to segments, on the recorder's thread."""

    def __init__(
        self, folder: Path, header: JournalHeader, mask: Mask | None, limits: RecordingLimits
    ) -> None:
        self._folder = folder
        self._header = header
        self._mask = mask
        self._limits = limits
        self._number = 0  # of the last event
        self._segment_bytes = self._checked_bytes = 0
        self._folding: subprocess.Popen[bytes] | None = None
        self._file = self._open_segment(1)

    def write(self, call: Call) -> None:
        """Appends a call, to a new segment if the last one is full."""
        if self._segment_bytes >= self._limits.segment_bytes:
            self._file.close()
            self._make_room(self._limits.segment_bytes)
            self._file = self._open_segment(self._header.segment + 1)
        for shown in [call] if self._mask is None else masked(call, self._mask):
            self._number += 1
            self._append(JournalRecord(event=to_event(self._number, shown)))

    def flush(self) -> None:
        """Flushes buffered bytes to the operating system."""
        self._file.flush()
        segment_bytes, written = self._limits.segment_bytes, self._segment_bytes
        if written - self._checked_bytes >= segment_bytes // _CHECKS:
            self._make_room(max(segment_bytes - written, 0))

    def is_settled(self) -> bool:
        """True if no cut is in progress."""
        return self._folding is None or self._folding.poll() is not None

    def close(self) -> None:
        """Closes the files."""
        try:
            self._file.close()
        except OSError as error:
            logger.error("the end of %s is lost: %s", self._folder, error)
        if self._folding is not None:
            self._folding.terminate()
            self._folding.wait()

    def _open_segment(self, number: int) -> BinaryIO:
        self._header.segment = number
        self._header.first_event = self._number + 1
        self._segment_bytes = self._checked_bytes = 0
        self._file = segments.create(segments.segment_path(self._folder, number))
        self._append(JournalRecord(header=self._header))
        return self._file

    def _append(self, record: JournalRecord) -> None:
        packed = records.pack(record)
        self._file.write(packed)
        self._segment_bytes += len(packed)

    def _make_room(self, until_bytes: int) -> None:
        """Starts replacing the oldest segments by a snapshot before the limit is reached.

        Another process does it, since it replays the segments. Raises Stopped when there is no
        room.
        """
        self._checked_bytes = self._segment_bytes
        if self._folding is not None and self.is_settled():
            if self._folding.returncode:
                raise Stopped("the oldest segments do not replay, so they cannot be cut off")
            self._folding = None
        total, max_bytes = segments.size_bytes(self._folder, _EVENTS), self._limits.max_bytes
        if total + until_bytes > max_bytes:
            raise Stopped(f"{total} bytes are written and the oldest are not cut off yet")
        if self._folding is None and total > _FOLD_FROM * max_bytes:
            module = ("-m", "scheduler_svc.journal.fold")
            most_bytes = str(int(_FOLD_TO * max_bytes))
            command = (sys.executable, *module, str(self._folder), most_bytes)
            self._folding = subprocess.Popen(command, cwd=_SERVICE_FOLDER)
