"""Bounds a request's fields, numbers and entries, counted before it is parsed or walked.

A parser makes an object of every message within a message, and two bytes say that there is one.
"""

from collections.abc import Mapping
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor

COUNTED_BYTES = 64 << 10  # what is shorter holds too little to be counted
MAX_FIELDS = 1 << 16  # of a message and of those in it; a packed list of numbers is one
MAX_NUMBERS = 1 << 20  # in packed lists
MAX_ENTRIES = 1 << 15  # of a list that has no entry here
MOST_ENTRIES: Mapping[str, int] = {
    "pagewire.v1.TokenIds.ids": MAX_NUMBERS,
    "pagewire.v1.DetokenizeRequest.token_ids": MAX_NUMBERS,
    "pagewire.v1.GenerationOptions.resume_token_ids": MAX_NUMBERS,
    "pagewire.v1.ResumedOutput.token_ids": MAX_NUMBERS,
    "pagewire.v1.SchedulerServiceGenerateRequest.prompt_token_ids": MAX_NUMBERS,
    "pagewire.v1.SamplingParams.allowed_token_ids": 1 << 14,
    "pagewire.v1.SamplingParams.bad_words_token_ids": 1024,
    "pagewire.v1.SamplingParams.logit_bias": 1024,
    "pagewire.v1.SamplingParams.logprob_token_ids": 1024,
    "pagewire.v1.SamplingParams.stop_token_ids": 1024,
    "pagewire.v1.TokenSequence.token_ids": 1024,
    "pagewire.v1.GenerationOptions.bad_words": 1024,
    "pagewire.v1.GenerationOptions.stop": 1024,
    "pagewire.v1.GenerationOptions.resume_outputs": 1024,
    "pagewire.v1.ChatMessage.tool_calls": 1024,
    "pagewire.v1.ChatMessage.picture_files": 1024,
    "pagewire.v1.SchedulerServiceGenerateRequest.pictures": 1024,
    "pagewire.v1.PicturePixels.grid": 3,
    "pagewire.v1.PicturePixels.means": 3,
    "pagewire.v1.PicturePixels.deviations": 3,
    "pagewire.v1.EmbedRequest.inputs": 2048,
}
# The last byte of each number alone has its high bit clear.
_NOT_LAST = bytes(range(0x80, 0x100))
_VARINT, _FIXED64, _DELIMITED, _START_GROUP, _END_GROUP, _FIXED32 = range(6)
_FIXED_BYTES = {_FIXED64: 8, _FIXED32: 4, _START_GROUP: 0, _END_GROUP: 0}
_TEXTS = frozenset({FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES})
_FLOAT_BYTES = {FieldDescriptor.TYPE_FLOAT: 4, FieldDescriptor.TYPE_DOUBLE: 8}


class TooMany(ValueError):
    """Raised for a request that holds more than may be parsed."""


def check_counts(kind: Descriptor, data: bytes) -> None:
    """Raises TooMany for the bytes of a message of this kind that holds too much.

    Bytes that are no such message are left to the parser.
    """
    if len(data) <= COUNTED_BYTES:
        return
    num_fields = num_numbers = 0
    left = [(kind, 0, len(data))]
    while left:
        message, at, end = left.pop()
        while at < end:
            num_fields += 1
            if num_fields > MAX_FIELDS:
                raise TooMany(f"the request holds more than {MAX_FIELDS} fields")
            try:
                field, begin, at = _next_field(message, data, at)
            except IndexError:
                return
            if field is None or begin is None:
                continue
            if field.message_type is not None:
                left.append((field.message_type, begin, min(at, end)))
            elif field.type not in _TEXTS:
                num_numbers += _num_numbers(field, data[begin:at])
                if num_numbers > MAX_NUMBERS:
                    raise TooMany(f"the request holds more than {MAX_NUMBERS} numbers")


def most_entries(field: FieldDescriptor) -> int:
    """The most entries of a list."""
    return MOST_ENTRIES.get(field.full_name, MAX_ENTRIES)


def _num_numbers(field: FieldDescriptor, packed: bytes) -> int:
    """The numbers of a packed list."""
    if (size := _FLOAT_BYTES.get(field.type)) is not None:
        return len(packed) // size
    return len(packed.translate(None, _NOT_LAST))


def _next_field(message: Descriptor, data: bytes, at: int) -> tuple[Any, int | None, int]:
    """The field at a place if the message has it, where its bytes begin if it has, and its end.

    Raises IndexError where the bytes end within it.
    """
    tag, at = _varint(data, at)
    field, wire_type = message.fields_by_number.get(tag >> 3), tag & 7
    if wire_type == _VARINT:
        _, at = _varint(data, at)
        return field, None, at
    if wire_type == _DELIMITED:
        length, begin = _varint(data, at)
        return field, begin, begin + length
    if wire_type not in _FIXED_BYTES:
        raise IndexError
    return field, None, at + _FIXED_BYTES[wire_type]


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """The number at a place, and its end."""
    byte = data[at]
    if byte < 0x80:
        return byte, at + 1
    number = shift = 0
    while byte >= 0x80:
        number |= (byte & 0x7F) << shift
        shift, at = shift + 7, at + 1
        if shift > 63:
            raise IndexError
        byte = data[at]
    return number | byte << shift, at + 1
