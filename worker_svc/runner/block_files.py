"""Files of a disk tier: one block of the KV cache each, named by its key.

A file is right if it begins as it would be written today: with the layout of the cache, the key and
the content that the key is a check of. No number in it is used, so one that is cut, changed, of
another model or hostile is never served: it is removed, and a miss. What is read is checked by a
checksum as well, which a file that was torn by a loss of power does not fit.
"""

import contextlib
import os
import secrets
import stat
import struct
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from xxhash import xxh3_64_intdigest

from worker_svc.protocol.transfers import Keys

_MAGIC, _VERSION = b"pagewire", 1
_HEAD = struct.Struct("<8sIIQ16sQQ")  # magic, version, bytes of content and payload, layout, key
_CHECKSUM = struct.Struct("<Q")  # of the payload; between content and payload
LAYOUT_BYTES = 16
_SUFFIX, _UNFINISHED = ".kv", ".part"
_ABANDONED_S = 3_600.0  # an unfinished file of this age is no living process's
_PAGE = 4096  # of file systems, to which sizes are rounded up
_READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # no link, no pipe
_WRITE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


class Full(Exception):
    """Raised when the folder holds as many blocks as it may."""


@dataclass(frozen=True, slots=True)
class NamedBlock:
    """Key and content of a block, which its file's name and beginning say."""

    block_hash: int
    check: int
    content: bytes

    @property
    def name(self) -> str:
        """The file's name: 128 bits."""
        return f"{self.block_hash:016x}{self.check:016x}{_SUFFIX}"


class BlockFiles:
    """The files of one folder, which other processes may use as well."""

    def __init__(self, folder: Path, layout: bytes, block_bytes: int, max_blocks: int) -> None:
        self._folder = folder
        self._layout = layout
        self._block_bytes = block_bytes
        self._max_blocks = max_blocks
        self._lock = threading.Lock()
        self._held: set[str] = set()  # names

    def __len__(self) -> int:
        return len(self._held)

    def open(self) -> Keys:
        """Makes the folder, or finds what it holds: keys [n, 2], the one used longest ago first.

        What is too much is removed. Raises OSError.
        """
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found: list[tuple[int, str]] = []
        with os.scandir(self._folder) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):  # another process has removed it
                    self._note(entry, found)
        found.sort()
        names = [name for _, name in found]
        begin = max(len(names) - self._max_blocks, 0)
        for name in names[:begin]:
            self._unlink(name)
        with self._lock:
            self._held = set(names[begin:])
        keys = [(int(name[:16], 16), int(name[16:32], 16)) for name in names[begin:]]
        return np.array(keys, dtype=np.uint64).reshape(-1, 2)

    def _note(self, entry: "os.DirEntry[str]", found: list[tuple[int, str]]) -> None:
        status, name = entry.stat(follow_symlinks=False), entry.name
        if not stat.S_ISREG(status.st_mode):
            return
        if _is_name(name):
            found.append((status.st_mtime_ns, name))
        elif name.endswith(_UNFINISHED) and time.time() - status.st_mtime > _ABANDONED_S:
            self._unlink(name)

    def write(self, block: NamedBlock, payload: memoryview) -> None:
        """Keeps a block's bytes. Raises Full and OSError, after which there is no such file."""
        with self._lock:
            if block.name not in self._held and len(self._held) >= self._max_blocks:
                raise Full(f"the disk tier holds {len(self._held)} blocks, as many as it may")
            self._held.add(block.name)
        try:
            try:
                self._write(block, payload)
            except FileNotFoundError:  # the folder was removed while this process ran
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._write(block, payload)
        except BaseException:
            with self._lock:
                self._held.discard(block.name)
            raise

    def _write(self, block: NamedBlock, payload: memoryview) -> None:
        unfinished = self._folder / f"{secrets.token_hex(8)}{_UNFINISHED}"
        checksum = _CHECKSUM.pack(xxh3_64_intdigest(payload))
        try:
            with open(os.open(unfinished, _WRITE_FLAGS, 0o600), "wb") as file:
                file.write(self._head(block) + checksum)
                file.write(payload)
            unfinished.rename(self._folder / block.name)
        except BaseException:
            with contextlib.suppress(OSError):
                unfinished.unlink()
            raise

    def read(self, block: NamedBlock, payload: memoryview) -> bool:
        """Fills `payload` with a block's bytes; False if it is not here, or its file is wrong.

        After False `payload` may hold anything.
        """
        try:
            descriptor = os.open(self._folder / block.name, _READ_FLAGS)
        except FileNotFoundError:
            self.remove([block.name])  # which another process has done
            return False
        except OSError:  # of this moment, or of the disk: the file may be right
            return False
        try:
            is_right = self._read(block, payload, descriptor)
            if is_right:
                with contextlib.suppress(OSError):
                    os.utime(descriptor)  # it was used just now
        except OSError:
            return False
        finally:
            os.close(descriptor)
        if not is_right:
            self.remove([block.name])
        return is_right

    def _read(self, block: NamedBlock, payload: memoryview, descriptor: int) -> bool:
        head, status = self._head(block), os.fstat(descriptor)
        size = len(head) + _CHECKSUM.size
        if not stat.S_ISREG(status.st_mode) or status.st_size != size + self._block_bytes:
            return False
        with open(descriptor, "rb", closefd=False) as file:
            begin = file.read(size)
            if begin[: len(head)] != head or file.readinto(payload) != self._block_bytes:
                return False
        return _CHECKSUM.pack(xxh3_64_intdigest(payload)) == begin[len(head) :]

    def _head(self, block: NamedBlock) -> bytes:
        sizes = len(block.content), self._block_bytes
        key = block.block_hash, block.check
        return _HEAD.pack(_MAGIC, _VERSION, *sizes, self._layout, *key) + block.content

    def remove(self, names: list[str]) -> None:
        """Removes files; those that are not here are none."""
        for name in names:
            self._unlink(name)
        with self._lock:
            self._held.difference_update(names)

    def remove_all(self) -> None:
        """Removes all files of blocks, of other processes as well."""
        self.open()  # which finds those
        self.remove(list(self._held))

    def _unlink(self, name: str) -> None:
        with contextlib.suppress(OSError):
            (self._folder / name).unlink()


def names_of(keys: Keys) -> list[str]:
    """The names of the files of blocks with these keys [n, 2]."""
    return [NamedBlock(block_hash, check, b"").name for block_hash, check in keys.tolist()]


def file_bytes(block_bytes: int, content_bytes: int) -> int:
    """Bytes that a block takes on a disk."""
    size = _HEAD.size + content_bytes + _CHECKSUM.size + block_bytes
    return -(-size // _PAGE) * _PAGE


def _is_name(name: str) -> bool:
    digits = name.removesuffix(_SUFFIX)
    return len(digits) == 32 and len(name) == 32 + len(_SUFFIX) and not set(digits) - set(_DIGITS)


_DIGITS = "0123456789abcdef"
