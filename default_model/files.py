"""Durable files, and the manifest that verifies them later.

It knows nothing about models.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True)
class FileEntry:
    """The expected size and hash of a file."""

    size_bytes: int
    sha256: str


class DurableFile:
    """A new file that hashes its content; synced to disk if the `with` block succeeds."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("xb")
        self._hash = hashlib.sha256()
        self._size_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._file:
            if kind is None:
                self._file.flush()
                os.fsync(self._file.fileno())

    def write(self, chunk: bytes | memoryview) -> None:
        self._file.write(chunk)
        self._hash.update(chunk)
        self._size_bytes += len(chunk)

    @property
    def entry(self) -> FileEntry:
        """Size and hash of the content so far."""
        return FileEntry(self._size_bytes, self._hash.hexdigest())


def write_text(path: Path, text: str) -> FileEntry:
    """Writes a small file."""
    with DurableFile(path) as file:
        file.write(text.encode())
    return file.entry


def write_manifest(folder: Path, entries: Mapping[str, FileEntry]) -> None:
    """Records the files of a folder, by their paths below it."""
    table = {name: asdict(entry) for name, entry in entries.items()}
    write_text(folder / MANIFEST, json.dumps({"files": table}, indent=2) + "\n")


def damage(folder: Path, *, hashes: bool) -> str | None:
    """The first difference between a folder and its manifest, as text; None when there is none.

    Checking sizes alone takes microseconds; hashes read all content.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        entries = {name: FileEntry(**entry) for name, entry in manifest["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST} cannot be read ({type(error).__name__})"
    for name, entry in entries.items():
        path = folder / name
        size_bytes = path.stat().st_size if path.is_file() else 0
        if size_bytes != entry.size_bytes:
            return f"{name} has {size_bytes} of {entry.size_bytes} bytes"
        if hashes and _sha256(path) != entry.sha256:
            return f"{name} has another SHA-256 than when it was written"
    return None


def sync_folder(folder: Path) -> None:
    """Syncs the folder's list of names to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
