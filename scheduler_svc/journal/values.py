"""Serializes objects of the core as JSON and columns, preserving shared references.

Reading runs no code that a file could choose: a file can only name plain classes of the core, their
constructors are not called, and the fields of dataclasses are checked.
"""

import array
import importlib
import json
import pkgutil
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any

import numpy as np

from pagewire.v1.journal_pb2 import JournalValues
from scheduler_svc import core
from scheduler_svc.journal.older import ENUM_VALUES, take_older
from scheduler_svc.sampling import Sampling
from wire.adapters import AdapterSource

Json = Any
_SCALARS = (bool, int, float, str)
_COLLECTIONS: dict[str, type] = {
    kind.__name__: kind for kind in (list, tuple, set, frozenset, dict, deque, Counter)
}
_SPARSE_FROM = 1 << 16  # bytes; of larger arrays, only pieces with nonzero values are written


class BadValues(ValueError):
    """Raised for values that this version cannot read or write; the message names them."""


@cache
def _classes() -> dict[str, type]:
    """All classes of the core, by name."""
    found: dict[str, type] = {one.__name__: one for one in (Sampling, AdapterSource)}
    for module_info in pkgutil.walk_packages(core.__path__, f"{core.__name__}."):
        module = importlib.import_module(module_info.name)
        for value in vars(module).values():
            if isinstance(value, type) and value.__module__ == module.__name__:
                found[value.__qualname__] = value
    return found


def encode(value: object) -> JournalValues:
    """Serializes a value made of the core's classes, numbers, text, collections and arrays.

    Raises BadValues for anything else.
    """
    writer = _Writer()
    root = writer.write(value)
    return JournalValues(json=json.dumps([root, writer.nodes]), columns=writer.columns)


def decode(values: JournalValues) -> Any:
    """The value that `encode` serialized. Raises BadValues."""
    try:
        root, nodes = json.loads(values.json)
        return _Reader(nodes, values.columns).read(root)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, BadValues):
            raise
        raise BadValues(f"values do not parse: {type(error).__name__}: {error}") from error


def as_read(value: object) -> Any:
    """A copy of the value as it would be read from a file."""
    return decode(encode(value))


class _Writer:
    """Writes scalars inline, and everything else once as a numbered node."""

    def __init__(self) -> None:
        self.nodes: list[Json] = []
        self.columns: list[bytes] = []
        self._numbers: dict[int, int] = {}
        self._kept: list[object] = []  # keeps their ids from being reused

    def write(self, value: object) -> Json:
        if value is None or type(value) in _SCALARS:
            return value
        if isinstance(value, np.generic):
            return value.item()
        if isinstance(value, Enum):
            return {"enum": type(value).__qualname__, "value": value.value}
        number = self._numbers.get(id(value))
        if number is None:
            number = self._numbers[id(value)] = len(self.nodes)
            self._kept.append(value)
            self.nodes.append(None)
            self.nodes[number] = self._node(value)
        return {"node": number}

    def _node(self, value: object) -> Json:
        kind = type(value)
        if isinstance(value, np.ndarray):
            return self._array(value)
        if isinstance(value, array.array):
            return ["array", value.typecode, self._column(value.tobytes())]
        if kind in (dict, Counter):
            assert isinstance(value, dict)
            pairs = [[self.write(key), self.write(held)] for key, held in value.items()]
            return [kind.__name__, pairs]
        if isinstance(value, deque):
            return ["deque", [self.write(held) for held in value], value.maxlen]
        if kind.__name__ in _COLLECTIONS and kind is _COLLECTIONS[kind.__name__]:
            assert isinstance(value, list | tuple | set | frozenset)
            return [kind.__name__, [self.write(held) for held in value]]
        if _classes().get(kind.__qualname__) is kind:
            return ["object", kind.__qualname__, {k: self.write(v) for k, v in _state(value)}]
        raise BadValues(f"{kind.__module__}.{kind.__qualname__} cannot be recorded")

    def _array(self, value: "np.ndarray[Any, Any]") -> Json:
        dtype, shape = value.dtype.str, list(value.shape)
        if isinstance(value.base, np.ndarray):  # a view must be read as a view of the same memory
            offset = _address(value) - _address(value.base)
            return ["view", self.write(value.base), dtype, shape, offset, list(value.strides)]
        if value.nbytes <= _SPARSE_FROM:
            return ["ndarray", dtype, shape, self._column(value.tobytes())]
        flat = np.ascontiguousarray(value).view(np.uint8).reshape(-1)
        pieces = [
            [start, self._column(piece.tobytes())]
            for start in range(0, len(flat), _SPARSE_FROM)
            if (piece := flat[start : start + _SPARSE_FROM]).any()
        ]
        return ["sparse", dtype, shape, pieces]

    def _column(self, content: bytes) -> int:
        self.columns.append(content)
        return len(self.columns) - 1


def _address(value: "np.ndarray[Any, Any]") -> int:
    return int(value.__array_interface__["data"][0])


@cache
def _slots_of(kind: Any) -> tuple[str, ...]:
    """Names of the attributes that have a slot."""
    slots = [parent.__dict__.get("__slots__", ()) for parent in kind.__mro__]
    return tuple(n for names in slots for n in ((names,) if isinstance(names, str) else names))


def _state(value: object) -> Iterator[tuple[str, object]]:
    """Attributes that are set, with or without slots."""
    kind: Any = type(value)
    for name in _slots_of(kind):
        if hasattr(value, name):
            yield name, getattr(value, name)
    yield from getattr(value, "__dict__", {}).items()


class _Reader:
    """Creates objects before their contents, so that circular references work."""

    def __init__(self, nodes: list[Json], columns: Any) -> None:
        self._nodes = nodes
        self._columns = columns
        self._made: dict[int, object] = {}

    def read(self, written: Json) -> Any:
        if not isinstance(written, dict):
            return written
        if "enum" in written:
            name, value = written["enum"], written["value"]
            return _class_of(name, Enum)(ENUM_VALUES.get((name, value), value))
        number = written["node"]
        if number not in self._made:
            kind, *rest = self._nodes[number]
            make = _READERS.get(kind, _Reader._read_collection)
            self._made[number] = make(self, number, kind, *rest)
        return self._made[number]

    def _read_object(self, number: int, _: str, name: str, state: dict[str, Json]) -> object:
        kind = _class_of(name, object)
        value = self._made[number] = object.__new__(kind)
        state = dict(state)
        stands_for = take_older(name, state)
        if is_dataclass(kind):
            state = _completed(kind, state, value)
        for attribute, written in state.items():
            object.__setattr__(value, attribute, self.read(written))
        for attribute, now in stands_for.items():
            object.__setattr__(value, attribute, now)
        return value

    def _read_collection(self, number: int, name: str, content: Json, *more: Json) -> object:
        kind = _COLLECTIONS.get(name)
        if kind is None:
            raise BadValues(f"values name a {name}, which is no collection")
        if issubclass(kind, tuple | frozenset):
            return kind(self.read(held) for held in content)
        value: Any = kind([], *more) if kind is deque else kind()
        self._made[number] = value
        if isinstance(value, dict):
            for key, held in content:  # Counter.update would count
                value[self.read(key)] = self.read(held)
        else:
            (value.update if kind is set else value.extend)(self.read(held) for held in content)
        return value

    def _read_array(self, number: int, _: str, typecode: str, column: int) -> object:
        return array.array(typecode, self._columns[column])

    def _read_ndarray(
        self, number: int, _: str, dtype: str, shape: list[int], column: int
    ) -> object:
        return np.frombuffer(self._columns[column], dtype=_plain(dtype)).reshape(shape).copy()

    def _read_sparse(
        self, number: int, _: str, dtype: str, shape: list[int], pieces: Json
    ) -> object:
        value = np.zeros(shape, dtype=_plain(dtype))
        flat = value.view(np.uint8).reshape(-1)
        for start, column in pieces:
            piece = np.frombuffer(self._columns[column], dtype=np.uint8)
            flat[start : start + len(piece)] = piece
        return value

    def _read_view(
        self,
        number: int,
        _: str,
        base: Json,
        dtype: str,
        shape: list[int],
        offset: int,
        strides: list[int],
    ) -> object:
        return np.ndarray(shape, _plain(dtype), self.read(base), offset, strides)


_READERS: dict[str, Callable[..., object]] = {
    "object": _Reader._read_object,
    "array": _Reader._read_array,
    "ndarray": _Reader._read_ndarray,
    "sparse": _Reader._read_sparse,
    "view": _Reader._read_view,
}


def _class_of(name: str, parent: type) -> Any:
    kind = _classes().get(name)
    if kind is None or not issubclass(kind, parent):
        raise BadValues(f"values name {name}, which this version of the core does not have")
    return kind


def _plain(dtype: str) -> "np.dtype[Any]":
    plain = np.dtype(dtype)
    if plain.hasobject:
        raise BadValues(f"an array of {dtype} is no column")
    return plain


def _completed(kind: Any, state: dict[str, Json], value: object) -> dict[str, Json]:
    """Adds defaults for fields of a newer version. Raises BadValues, naming unknown fields."""
    known = {field.name: field for field in fields(kind)}
    unknown = sorted(state.keys() - known.keys())
    if unknown:
        raise BadValues(
            f"{kind.__name__} was recorded with {', '.join(unknown)}, which this version of the "
            "core does not know"
        )
    for name in known.keys() - state.keys():
        default, factory = known[name].default, known[name].default_factory
        if default is MISSING and factory is MISSING:
            raise BadValues(f"{kind.__name__} was recorded without {name}")
        object.__setattr__(value, name, default if factory is MISSING else factory())
    return state
