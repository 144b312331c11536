"""Reads the one object that helm sends as protobuf: the Secret with its release."""

import base64
from collections.abc import Iterator
from typing import Any

MAGIC = b"k8s\0"
# Numbers of fields, from the public definitions of the API.
_TYPE, _RAW = 1, 2  # of Unknown
_NAME, _LABELS, _ANNOTATIONS = 1, 11, 12  # of ObjectMeta
_METADATA, _DATA, _SECRET_TYPE = 1, 2, 3  # of Secret


def secret(message: bytes) -> dict[str, Any]:
    """A Secret as JSON would have it. Raises ValueError for another kind."""
    envelope = dict(_fields(message[len(MAGIC) :]))
    what = dict(_fields(envelope[_TYPE]))
    kind = what[2].decode()
    if kind != "Secret":
        raise ValueError(f"protobuf of kind {kind}")
    found: dict[str, Any] = {"apiVersion": "v1", "kind": kind, "metadata": {}, "data": {}}
    for number, value in _fields(envelope[_RAW]):
        if number == _METADATA:
            found["metadata"] = _metadata(value)
        elif number == _DATA:
            name, content = _pair(value)
            found["data"][name] = base64.b64encode(content).decode()
        elif number == _SECRET_TYPE:
            found["type"] = value.decode()
    return found


def _metadata(message: bytes) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for number, value in _fields(message):
        if number == _NAME:
            found["name"] = value.decode()
        elif number in (_LABELS, _ANNOTATIONS):
            name, content = _pair(value)
            where = "labels" if number == _LABELS else "annotations"
            found.setdefault(where, {})[name] = content.decode()
    return found


def _pair(message: bytes) -> tuple[str, bytes]:
    entry = dict(_fields(message))
    return entry.get(1, b"").decode(), entry.get(2, b"")


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    place = 0
    while place < len(message):
        tag, place = _varint(message, place)
        number, wire_type = tag >> 3, tag & 7
        if wire_type == 0:
            value, place = _varint(message, place)
            yield number, value
        elif wire_type == 2:
            length, place = _varint(message, place)
            yield number, message[place : place + length]
            place += length
        else:
            place += 8 if wire_type == 1 else 4


def _varint(message: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[place]
        place += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, place
