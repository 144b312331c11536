"""The header of a GGUF file: its metadata, and where each tensor lies.

Knows the container and no model. Every count and size is checked against the bytes that are there
before anything is allocated for it, so a damaged file is an error that names the file and the key.
"""

import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any, NoReturn

from pagewire.gguf.types import TENSOR_TYPES, TYPE_NAMES, TensorType

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = "general.alignment"
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4
MAX_NAME_BYTES = 1 << 16  # of a key or a tensor
MOST_SHOWN = 200  # characters of a name, in messages
LEAST_TENSOR_BYTES = 8 + 4 + 4 + 8  # of its entry in the header

# Types of metadata: number in the file -> (format, bytes).
SCALARS = {
    0: ("<B", 1),
    1: ("<b", 1),
    2: ("<H", 2),
    3: ("<h", 2),
    4: ("<I", 4),
    5: ("<i", 4),
    6: ("<f", 4),
    7: ("<?", 1),
    10: ("<Q", 8),
    11: ("<q", 8),
    12: ("<d", 8),
}
STRING, ARRAY, LENGTH_BYTES = 8, 9, 8


class BadGguf(ValueError):
    """A GGUF file is damaged or not supported; the message names the file and the key."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """The place of a tensor in its file, and the form in which it is stored."""

    name: str
    shape: tuple[int, ...]  # as in torch: the last dimension is contiguous
    type_name: str  # such as Q4_K
    offset: int  # in bytes, from the start of the file
    num_bytes: int

    def slices(self) -> Iterator["GgufTensor"]:
        """The tensors along the first dimension, which lie one after the other."""
        count, *shape = self.shape
        num_bytes = self.num_bytes // count
        for index in range(count):
            offset = self.offset + index * num_bytes
            yield GgufTensor(self.name, tuple(shape), self.type_name, offset, num_bytes)


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The metadata of a file by key, and its tensors by name."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    def refuse(self, problem: str) -> NoReturn:
        """Raises BadGguf with the file's name."""
        raise BadGguf(f"{self.path.name}: {problem}")

    def get(self, key: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """The value of a key, of this type. Raises BadGguf for another type."""
        value = self.metadata.get(key, default)
        if value is None:
            return None
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            self.refuse(f"{key}: {_short(value)} is not of type {kinds[0].__name__}")
        return value

    def require(self, key: str, kind: type | tuple[type, ...]) -> Any:
        """The value of a key that must be there. Raises BadGguf."""
        value = self.get(key, kind)
        if value is None:
            self.refuse(f"{key} is missing")
        return value


def read_header(path: Path) -> GgufHeader:
    """The header of a file. Raises BadGguf, or OSError for a file that cannot be read."""
    stat = path.stat()
    return _cached(path, stat.st_size, stat.st_mtime_ns)


@lru_cache(maxsize=1)  # a process reads one model, and several parts of its header
def _cached(path: Path, size: int, _mtime_ns: int) -> GgufHeader:
    if not size:
        raise BadGguf(f"{path.name}: the file is empty")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return _Reader(path, data).header()


class _Reader:
    """A position in the file, from which values are taken."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._at = 0
        self._reading = "the header"  # for messages

    def header(self) -> GgufHeader:
        """Reads all of it."""
        if self._data[:4] != MAGIC:
            self._fail(f"it does not begin with {MAGIC.decode()}, so it is no GGUF file")
        self._at = 4
        version = self._number("<I", 4)
        if version not in VERSIONS:
            self._fail(f"version {version} is not supported, only {VERSIONS} are")
        num_tensors = self._count("the number of tensors", LEAST_TENSOR_BYTES)
        num_keys = self._count("the number of keys", LENGTH_BYTES + 4 + 1)
        metadata = self._metadata(num_keys)
        entries = [self._entry() for _ in range(num_tensors)]
        tensors = self._placed(entries, self._data_start(metadata))
        return GgufHeader(self._path, metadata, tensors)

    def _metadata(self, count: int) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for _ in range(count):
            self._reading = "the name of a key"
            key = self._string(MAX_NAME_BYTES)
            self._reading = key
            if key in metadata:
                self._fail("the key is there twice")
            metadata[key] = self._value(self._number("<I", 4))
        return metadata

    def _value(self, kind: int) -> Any:
        if kind in SCALARS:
            return self._number(*SCALARS[kind])
        if kind == STRING:
            return self._string()
        if kind != ARRAY:
            self._fail(f"{kind} is no type of a value")
        item = self._number("<I", 4)
        if item == STRING:
            return [self._string() for _ in range(self._count("its length", LENGTH_BYTES))]
        if item not in SCALARS:
            self._fail(f"an array of type {item} is not supported")
        letter, size = SCALARS[item][0][1], SCALARS[item][1]
        count = self._count("its length", size)
        items: Any = memoryview(self._take(count * size))
        return items.cast(letter)  # of a little-endian machine

    def _entry(self) -> tuple[str, tuple[int, ...], TensorType, int]:
        """A tensor's name, shape, type and offset in the data."""
        self._reading = "the name of a tensor"
        name = self._string(MAX_NAME_BYTES)
        self._reading = f"tensor {name}"
        num_dimensions = self._number("<I", 4)
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            self._fail(f"it has {num_dimensions} dimensions")
        sizes = [self._number("<Q", 8) for _ in range(num_dimensions)]
        number, offset = self._number("<I", 4), self._number("<Q", 8)
        if number not in TENSOR_TYPES:
            name = TYPE_NAMES.get(number, str(number))
            known = ", ".join(each.name for each in TENSOR_TYPES.values())
            self._fail(f"type {name} is not supported; supported are {known}")
        return name, tuple(reversed(sizes)), TENSOR_TYPES[number], offset

    def _placed(
        self, entries: list[tuple[str, tuple[int, ...], TensorType, int]], start: int
    ) -> dict[str, GgufTensor]:
        tensors: dict[str, GgufTensor] = {}
        for name, shape, kind, offset in entries:
            self._reading = f"tensor {name}"
            if name in tensors:
                self._fail("it is there twice")
            if not all(shape) or shape[-1] % kind.block_size:
                self._fail(f"shape {shape} is no multiple of {kind.name}'s {kind.block_size}")
            num_bytes = prod(shape) // kind.block_size * kind.block_bytes
            if start + offset + num_bytes > len(self._data):
                self._fail(
                    f"it ends at byte {start + offset + num_bytes}, and the file has "
                    f"{len(self._data)}: it is cut off or damaged"
                )
            tensors[name] = GgufTensor(name, shape, kind.name, start + offset, num_bytes)
        return tensors

    def _data_start(self, metadata: Mapping[str, Any]) -> int:
        alignment = metadata.get(ALIGNMENT, DEFAULT_ALIGNMENT)
        self._reading = ALIGNMENT
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            self._fail(f"{_short(alignment)} is no power of two")
        return -(-self._at // alignment) * alignment

    def _string(self, most_bytes: int | None = None) -> str:
        size = self._number("<Q", 8)
        if most_bytes is not None and size > most_bytes:
            self._fail(f"it has {size} bytes, more than {most_bytes}")
        taken = self._take(size)
        try:
            return taken.decode()
        except UnicodeDecodeError:
            self._fail("it is no UTF-8 text")

    def _count(self, what: str, least_bytes: int) -> int:
        """A number of items, each of which takes at least so many bytes."""
        count = self._number("<Q", 8)
        if count * least_bytes > len(self._data) - self._at:
            self._fail(f"{what}, {count}, is more than the {len(self._data)} bytes can hold")
        return int(count)

    def _number(self, form: str, size: int) -> Any:
        return struct.unpack(form, self._take(size))[0]

    def _take(self, size: int) -> bytes:
        end = self._at + size
        if end > len(self._data):
            self._fail(
                f"{size} bytes from byte {self._at} on are asked for, and the file has "
                f"{len(self._data)}: it is cut off or damaged"
            )
        taken = self._data[self._at : end]
        self._at = end
        return taken

    def _fail(self, problem: str) -> NoReturn:
        place = self._reading[:MOST_SHOWN]
        place = place if place.isprintable() else repr(place)
        raise BadGguf(f"{self._path.name}: {place}: {problem}")


def shortest(value: float) -> float:
    """The shortest decimal of a float32: what its author wrote."""
    packed = struct.pack("<f", value)
    for digits in range(1, 10):
        shorter = float(f"{value:.{digits}g}")
        if struct.pack("<f", shorter) == packed:
            return shorter
    return value


def _short(value: object) -> str:
    text = repr(value[:8] if isinstance(value, str | list) else value)
    return text if len(text) <= 60 else text[:57] + "..."
