"""The numbers of requests, bounded by what the columns that hold them can hold.

Every number of every message is bounded by its type, one narrower than the wire's: a column of
numbers is int32 or float32, so a uint32 may not exceed an int32. `WIDER` and `NARROWER` name the
fields whose column is another. A field that is added later is bounded without an entry here. What a
number may mean (a temperature from 0 to 2) is checked by those who read it.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from wire.requests.counts import most_entries

INT32_MAX, UINT32_MAX = 2**31 - 1, 2**32 - 1
INT64_MAX, UINT64_MAX = 2**63 - 1, 2**64 - 1
FLOAT32_MAX = 3.4e38  # the worker computes in float32, where more is infinite
LONGEST_TIMEOUT_S = 1e9  # 30 years; beyond, a clock in float64 loses its milliseconds

_Type = FieldDescriptor


class BadNumber(ValueError):
    """Raised for a number out of bounds; the message begins with its field."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field


@dataclass(frozen=True, slots=True)
class Bound:
    """A closed range. NaN is in none."""

    low: float
    high: float

    def outside(self, values: Iterable[float]) -> float | None:
        """The first value outside; None when there is none."""
        return next((value for value in values if not self.low <= value <= self.high), None)


BY_TYPE = {
    _Type.TYPE_INT32: Bound(-INT32_MAX - 1, INT32_MAX),
    _Type.TYPE_INT64: Bound(-INT64_MAX - 1, INT64_MAX),
    _Type.TYPE_UINT32: Bound(0, INT32_MAX),
    _Type.TYPE_UINT64: Bound(0, INT64_MAX),
    _Type.TYPE_FLOAT: Bound(-FLOAT32_MAX, FLOAT32_MAX),
    _Type.TYPE_DOUBLE: Bound(-FLOAT32_MAX, FLOAT32_MAX),
}
WIDER = {
    "pagewire.v1.SamplingParams.seed": Bound(0, UINT64_MAX),  # a column of uint64
    "pagewire.v1.SamplingParams.max_tokens": Bound(0, UINT32_MAX),  # of the length limit, the less
    "pagewire.v1.Submit.handle": Bound(0, UINT32_MAX),  # a column of uint32
    "pagewire.v1.AbortHandle.handle": Bound(0, UINT32_MAX),
}
NARROWER = {
    # Of the past it is a deadline that has passed, not a bad number.
    "pagewire.v1.Submit.timeout_s": Bound(-LONGEST_TIMEOUT_S, LONGEST_TIMEOUT_S),
    # After the second death a request is not submitted again.
    "pagewire.v1.Submit.num_deaths": Bound(0, 1),
    "pagewire.v1.SchedulerServiceGenerateRequest.num_deaths": Bound(0, 1),
    "pagewire.v1.GenerationOptions.num_deaths": Bound(0, 1),
}


@cache
def bound_of(field: FieldDescriptor) -> Bound | None:
    """The bound of a field's numbers; None for what is no number. Enums have known values only."""
    if field.enum_type is not None:
        numbers = field.enum_type.values_by_number
        return Bound(min(numbers), max(numbers))
    exception = WIDER.get(field.full_name) or NARROWER.get(field.full_name)
    return exception or BY_TYPE.get(field.type)


def check_numbers(message: Message) -> None:
    """Raises BadNumber for the first number of a message that is out of bounds."""
    _check(message, "")


def _check(message: Message, place: str) -> None:
    """`place` names the entries of lists on the way; single messages are left out of names."""
    for field, value in message.ListFields():
        if field.is_repeated and len(value) > (most := most_entries(field)):
            raise BadNumber(
                f"{place}{field.name}", f"{len(value)} entries, at most {most} are allowed"
            )
        entries = value if field.is_repeated else (value,)
        if field.type == _Type.TYPE_MESSAGE:
            for index, entry in enumerate(entries):
                _check(entry, f"{place}{field.name}[{index}]." if field.is_repeated else place)
        elif (bound := bound_of(field)) is not None:
            _check_entries(f"{place}{field.name}", entries, bound)


def _check_entries(name: str, entries: Any, bound: Bound) -> None:
    # A prompt has many ids: the extremes of integers say enough, of floats NaN hides them.
    is_long = len(entries) > 1 and isinstance(entries[0], int)
    worst = bound.outside((min(entries), max(entries)) if is_long else entries)
    if worst is not None:
        raise BadNumber(name, f"{worst} is outside [{_told(bound.low)}, {_told(bound.high)}]")


def _told(limit: float) -> str:
    return str(limit) if isinstance(limit, int) or math.isinf(limit) else f"{limit:g}"
