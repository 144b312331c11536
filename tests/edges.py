"""The edges of every number that a request can hold, found in descriptors and schemas.

Nothing here names a field: one that is added later is drawn as well.
"""

import math
from collections.abc import Iterator
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

INTEGERS = (0, 1, -1, 2**31 - 1, 2**31, -(2**31), 2**32 - 1, 2**63 - 1, 2**63, -(2**63), 2**64 - 1)
FLOATS = (
    *(0.0, -0.0, 1.0, -1.0, 5e-324, -5e-324, 1e-45, 1.2e-38, 3.4028234663852886e38, 3.5e38, 1e300),
    *(-1e300, 1.7976931348623157e308, math.inf, -math.inf, math.nan, 2.0**31, 2.0**63, 1e9, 1e10),
)
_RANGES = {
    FieldDescriptor.TYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.TYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.TYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.TYPE_ENUM: (-(2**31), 2**31 - 1),
}

Path = tuple[FieldDescriptor, ...]


def edges_of(field: FieldDescriptor) -> tuple[float, ...]:
    """The values of a numeric field to try; none for a field of another type."""
    if field.type in (FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_DOUBLE):
        return FLOATS
    if field.type not in _RANGES:
        return ()
    low, high = _RANGES[field.type]
    return tuple(value for value in INTEGERS if low <= value <= high)


def numbers_in(message: Descriptor, before: Path = ()) -> Iterator[Path]:
    """The paths of all numeric fields of a message and of the messages in it."""
    for field in message.fields:
        if field.message_type is not None:
            if field.message_type not in (step.message_type for step in before):
                yield from numbers_in(field.message_type, (*before, field))
        elif edges_of(field):
            yield (*before, field)


def with_number(message: Message, path: Path, value: float) -> Message:
    """A copy of a message with one number set, whatever the messages on the way."""
    changed = GetMessageClass(message.DESCRIPTOR)()
    changed.CopyFrom(message)
    place: Any = changed
    for field in path[:-1]:
        inner = getattr(place, field.name)
        place = (inner[0] if len(inner) else inner.add()) if field.is_repeated else inner
    last = path[-1]
    if last.is_repeated:
        getattr(place, last.name)[:] = [value]
    else:
        setattr(place, last.name, value)
    return changed


def name_of(path: Path) -> str:
    """The path of a field, as error messages have it, without indices."""
    return ".".join(field.name for field in path)
