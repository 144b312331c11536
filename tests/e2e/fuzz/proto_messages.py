"""Messages of the gRPC contracts, drawn from their descriptors with values at the edges."""

import random
import struct
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from tests.e2e.fuzz import values
from tests.e2e.fuzz.json_bodies import change_bytes

_INT32 = (FieldDescriptor.TYPE_INT32, FieldDescriptor.TYPE_SINT32, FieldDescriptor.TYPE_SFIXED32)
_INT64 = (FieldDescriptor.TYPE_INT64, FieldDescriptor.TYPE_SINT64, FieldDescriptor.TYPE_SFIXED64)
_UINT32 = (FieldDescriptor.TYPE_UINT32, FieldDescriptor.TYPE_FIXED32)
_UINT64 = (FieldDescriptor.TYPE_UINT64, FieldDescriptor.TYPE_FIXED64)
_REALS = (FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_DOUBLE)
_RANGES = {
    **dict.fromkeys(_INT32, (-(2**31), 2**31 - 1)),
    **dict.fromkeys(_INT64, (-(2**63), 2**63 - 1)),
    **dict.fromkeys(_UINT32, (0, 2**32 - 1)),
    **dict.fromkeys(_UINT64, (0, 2**64 - 1)),
}
LENGTHS = (0, 1, 1, 2, 3, 17, 130)
COLUMN = (-1, 0, 1, 2, 3, 5, 63, 64, 255, 1000, 49151, 49152, 2**31 - 1, -(2**31))


def mutate(message: Message, rng: random.Random) -> None:
    """Changes one field, here or in a message within."""
    fields: list[Any] = list(message.DESCRIPTOR.fields)
    field = rng.choice(fields)
    if rng.random() < 0.1:
        message.ClearField(field.name)
        return
    if _is_message(field):
        inner = getattr(message, field.name)
        if field.is_repeated:
            if not inner or rng.random() < 0.3:
                for _ in range(rng.choice(LENGTHS)):
                    inner.add()
            if inner:
                mutate(rng.choice(inner), rng)
        else:
            inner.SetInParent()
            if inner.DESCRIPTOR.fields:
                mutate(inner, rng)
        return
    if field.is_repeated:
        drawn = [_scalar(field, rng) for _ in range(rng.choice(LENGTHS))]
        del getattr(message, field.name)[:]
        getattr(message, field.name).extend(drawn)
        return
    setattr(message, field.name, _scalar(field, rng))


def encode(message: Message, rng: random.Random) -> bytes:
    """The message's bytes; some are then changed so that they may not parse."""
    payload = message.SerializeToString()
    if rng.random() < 0.08:
        return change_bytes(payload, rng)
    if rng.random() < 0.02:
        return b"\x1a\x02" * rng.choice((1, 50)) + payload + b"\xfb\x07\xfb\x07"
    return payload


def _is_message(field: FieldDescriptor) -> bool:
    return field.type in (FieldDescriptor.TYPE_MESSAGE, FieldDescriptor.TYPE_GROUP)


def _scalar(field: FieldDescriptor, rng: random.Random) -> Any:
    if field.type in _RANGES:
        least, most = _RANGES[field.type]
        return min(max(rng.choice(values.INTEGERS), least), most)
    if field.type in _REALS:
        return rng.choice([*values.FLOATS, *values.INFINITIES, -1.0, 0.9])
    if field.type == FieldDescriptor.TYPE_BOOL:
        return rng.random() < 0.5
    if field.type == FieldDescriptor.TYPE_ENUM:
        assert field.enum_type is not None
        known = [value.number for value in field.enum_type.values]
        return rng.choice([*known, -1, 99, 2**31 - 1])
    if field.type == FieldDescriptor.TYPE_STRING:
        return values.text(rng).encode("utf-8", "replace").decode()
    return column(rng)


def column(rng: random.Random) -> bytes:
    """Bytes as in a column of int32, or not a whole number of them."""
    drawn = [rng.choice(COLUMN) for _ in range(rng.choice(LENGTHS))]
    packed = struct.pack(f"<{len(drawn)}i", *drawn)
    return packed + rng.randbytes(rng.choice((0, 0, 0, 0, 1, 3)))
