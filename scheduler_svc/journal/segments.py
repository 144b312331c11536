"""The files of a recording: a folder with numbered segments, the oldest of which may be gone.

    <folder>/000003.snapshot    the core as it was when segment 3 began, if 2 is gone
    <folder>/000003.journal     a header and the events from there on
    <folder>/000004.journal     ...

Only the user who records may read them.
"""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

SUFFIX = ".journal"
SNAPSHOT_SUFFIX = ".snapshot"
MIB = 1 << 20


def segment_path(folder: Path, number: int) -> Path:
    """A segment's file."""
    return folder / f"{number:06d}{SUFFIX}"


def snapshot_path(folder: Path, number: int) -> Path:
    """The file of the core's state before a segment."""
    return folder / f"{number:06d}{SNAPSHOT_SUFFIX}"


def numbers(folder: Path) -> list[int]:
    """Numbers of the existing segments, oldest first."""
    return sorted(int(path.stem) for path in folder.glob(f"*{SUFFIX}") if path.stem.isdecimal())


def size_bytes(folder: Path, pattern: str = "*") -> int:
    """Total bytes of the files of a recording that match `pattern`."""
    total = 0
    for path in folder.glob(pattern):
        with suppress(FileNotFoundError):  # another process may cut off the oldest
            total += path.stat().st_size
    return total


def create(path: Path) -> BinaryIO:
    """Creates a file that only its owner may read. Raises FileExistsError."""
    return os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb")


def recordings(parent: Path) -> Iterator[Path]:
    """The recordings in a folder, oldest first: their names begin with the time."""
    return (path for path in sorted(parent.iterdir()) if path.is_dir() and numbers(path))


class Claim:
    """Locks a recording for writing until released, or until this process ends."""

    def __init__(self, folder: Path) -> None:
        """Raises BlockingIOError when another process has it."""
        self._descriptor = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._descriptor)
            raise

    def release(self) -> None:
        """Releases the lock: the recording is complete."""
        os.close(self._descriptor)


def prune(parent: Path, max_bytes: int) -> list[Path]:
    """Deletes the oldest recordings that are not being written until at most `max_bytes` are left.

    Returns the deleted folders.
    """
    pruned = []
    complete = list(recordings(parent))
    total = sum(map(size_bytes, complete))
    for folder in complete:
        if total <= max_bytes:
            break
        try:
            claim = Claim(folder)
        except BlockingIOError:
            continue
        total -= size_bytes(folder)
        shutil.rmtree(folder)
        claim.release()
        pruned.append(folder)
    return pruned
