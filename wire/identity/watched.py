"""Values made of files, made anew when a file changes on disk.

A value that cannot be made from the changed files keeps the last good one in force and is logged
once: a half-written certificate must not end a service.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

Value = TypeVar("Value")
Signature = tuple[tuple[int, int, int] | None, ...]  # time, size and inode; None: no such file

log = logging.getLogger("wire.identity")


class BadIdentityFile(RuntimeError):
    """Raised when a file of certificates, keys or tokens cannot be used; the message names it."""


class Watched(Generic[Value]):
    """A value and the files it is made of. For any thread."""

    def __init__(self, option: str, paths: Sequence[Path], read: Callable[[], Value]) -> None:
        """Reads at once. Raises BadIdentityFile, naming `option`, when that fails."""
        self._option = option
        self._paths = tuple(paths)
        self._read = read
        self._lock = threading.Lock()
        self._signature = _signature(self._paths)
        try:
            self._value = read()
        except (OSError, ValueError) as error:
            raise BadIdentityFile(f"{option}: {error}") from error

    def current(self) -> Value:
        """The value of the files as they are now, or the last good one."""
        signature = _signature(self._paths)
        if signature == self._signature:
            return self._value
        with self._lock:
            if signature != self._signature:
                self._renew(signature)
            return self._value

    def _renew(self, signature: Signature) -> None:
        # Taken before the files are read: a change while they are read shows at the next look.
        self._signature = signature
        try:
            self._value = self._read()
        except (OSError, ValueError) as error:
            log.error("%s: the changed file is not used: %s", self._option, error)
        else:
            log.info("%s: read again", self._option)


def _signature(paths: tuple[Path, ...]) -> Signature:
    return tuple(map(_signature_of, paths))


def _signature_of(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
