"""Files that are on the disk once written, and the manifest that proves they still are.

Knows nothing of models.
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
    """What a file must be."""

    size_bytes: int
    sha256: str


class DurableFile:
    """A new file that hashes what it is given; on the disk when the `with` block ends well."""

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
        """What has been written so far."""
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
    """What is wrong with a folder, in words; None when every file is what the manifest says.

    Sizes alone take microseconds; hashes read everything.
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
    """Puts the folder's list of names on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
