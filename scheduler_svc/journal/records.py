"""Files of records: each follows its length and two checksums, so that damage can be located.

An incomplete record at the end of a file was being written when its process died: it is ignored.
Any other deviation is damage, and an error.
"""

import io
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from google.protobuf.message import DecodeError

from pagewire.v1.journal_pb2 import JournalRecord

# Length of the record, CRC-32 of these four bytes, CRC-32 of the record; little-endian.
_PREFIX = struct.Struct("<III")
_LENGTH = struct.Struct("<I")


class Damaged(Exception):
    """Raised when a recording's bytes do not match their checksums."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A record and its position in the file."""

    record: JournalRecord
    path: Path
    offset: int  # bytes


def pack(record: JournalRecord) -> bytes:
    """A record with its prefix, as stored in a file."""
    payload = record.SerializeToString(deterministic=True)
    length = _LENGTH.pack(len(payload))
    return _PREFIX.pack(len(payload), zlib.crc32(length), zlib.crc32(payload)) + payload


def read(path: Path) -> Iterator[Stored]:
    """The records of a file in order. Raises Damaged, with file and offset."""
    with path.open("rb") as file:
        size = file.seek(0, io.SEEK_END)
        offset = file.seek(0)
        while offset < size:
            payload = _read_payload(file, path, offset, size)
            if payload is None:
                return
            try:
                record = JournalRecord.FromString(payload)
            except DecodeError as error:
                raise Damaged(f"{path} at byte {offset}: the record does not parse") from error
            yield Stored(record, path, offset)
            offset += _PREFIX.size + len(payload)


def _read_payload(file: IO[bytes], path: Path, offset: int, size: int) -> bytes | None:
    """The bytes of the record at `offset`; None when the file ends within it."""
    prefix = file.read(_PREFIX.size)
    if len(prefix) < _PREFIX.size:
        return None
    length, length_crc, payload_crc = _PREFIX.unpack(prefix)
    if zlib.crc32(prefix[: _LENGTH.size]) != length_crc:
        raise Damaged(f"{path} at byte {offset}: the length of a record is damaged")
    if offset + _PREFIX.size + length > size:
        return None
    payload = file.read(length)
    if zlib.crc32(payload) != payload_crc:
        raise Damaged(f"{path} at byte {offset}: a record of {length} bytes is damaged")
    return payload
