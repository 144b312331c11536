"""What a request holds is counted before it is parsed and walked, in every list of every message.

Nothing here names a field: one that is added later is filled as well.
"""

import sys
from collections.abc import Iterator
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message_factory import GetMessageClass

from pagewire.v1 import (
    debug_pb2,
    embedding_pb2,
    fleet_pb2,
    inference_pb2,
    live_pb2,
    scheduler_pb2,
    worker_pb2,
)
from tests.edges import Path, name_of
from wire.requests.check import Unreadable, _parser, problem_of
from wire.requests.counts import (
    COUNTED_BYTES,
    MAX_FIELDS,
    MAX_NUMBERS,
    MOST_ENTRIES,
    TooMany,
    check_counts,
)

FILES = (
    debug_pb2,
    embedding_pb2,
    fleet_pb2,
    inference_pb2,
    live_pb2,
    scheduler_pb2,
    worker_pb2,
)
MILLION = 1_000_000


def requests() -> Iterator[Descriptor]:
    """The messages that one call brings one of."""
    for file in FILES:
        for service in file.DESCRIPTOR.services_by_name.values():
            yield from (m.input_type for m in service.methods if not m.client_streaming)


def lists_in(message: Descriptor, before: Path = ()) -> Iterator[Path]:
    """The paths of all lists of a message and of the messages in it."""
    for field in message.fields:
        if field.is_repeated:
            yield (*before, field)
        inner = field.message_type
        if inner is not None and inner not in (step.message_type for step in before):
            yield from lists_in(inner, (*before, field))


PLACES = {
    f"{kind.name}.{name_of(path)}": (kind, path) for kind in requests() for path in lists_in(kind)
}


def key(field: FieldDescriptor, wire_type: int) -> bytes:
    number = field.number << 3 | wire_type
    return bytes([number]) if number < 0x80 else bytes([number & 0x7F | 0x80, number >> 7])


def length(size: int) -> bytes:
    parts = []
    while size >= 0x80:
        parts.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes([*parts, size])


def has_lengths(field: FieldDescriptor) -> bool:
    """True if each entry of a list has a length of its own."""
    texts = FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES
    return field.message_type is not None or field.type in texts


def filled(path: Path, count: int) -> bytes:
    """A message with so many entries in one list, each as short as can be."""
    *outer, field = path
    if has_lengths(field):
        data = (key(field, 2) + b"\0") * count
    else:
        sizes = {FieldDescriptor.TYPE_FLOAT: 4, FieldDescriptor.TYPE_DOUBLE: 8}
        entries = b"\1" * (count * sizes.get(field.type, 1))
        data = key(field, 2) + length(len(entries)) + entries
    for step in reversed(outer):
        data = key(step, 2) + length(len(data)) + data
    return data


def num_calls_of(work: Any) -> tuple[Any, int]:
    """The result of some work, and the calls that it takes."""
    num_calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        result = work()
    finally:
        sys.setprofile(None)
    return result, num_calls


@pytest.mark.parametrize("place", PLACES)
def test_a_million_entries_are_counted_before_they_are_made(place: str) -> None:
    kind, path = PLACES[place]
    num_parsed = 0

    def parse(data: bytes) -> Any:
        nonlocal num_parsed
        num_parsed += 1
        return GetMessageClass(kind).FromString(data)

    data = filled(path, MILLION)
    read = _parser(parse, kind)
    request = read(data)
    if has_lengths(path[-1]):
        assert isinstance(request, Unreadable) and num_parsed == 0
        assert f"{MAX_FIELDS} fields" in str(request)
        return
    problem, num_calls = num_calls_of(lambda: problem_of(request))
    assert num_calls < 1000, "it was walked"
    allowed = MOST_ENTRIES.get(path[-1].full_name, 0) >= MILLION
    assert (problem is None) == allowed
    assert allowed or "entries, at most" in str(problem)


@pytest.mark.parametrize("place", PLACES)
def test_a_list_has_at_most_so_many_entries(place: str) -> None:
    kind, path = PLACES[place]
    most = MOST_ENTRIES.get(path[-1].full_name, 1 << 15)
    if most == MAX_NUMBERS:
        with pytest.raises(TooMany, match="numbers"):
            check_counts(kind, filled(path, MAX_NUMBERS + 1))
        return
    message = GetMessageClass(kind)
    assert "entries" not in str(problem_of(message.FromString(filled(path, most))))
    problem = problem_of(message.FromString(filled(path, most + 1)))
    assert f"{most + 1} entries, at most {most}" in str(problem)


def test_bytes_that_are_no_message_are_left_to_the_parser() -> None:
    kind = inference_pb2.GenerateRequest.DESCRIPTOR
    read = _parser(inference_pb2.GenerateRequest.FromString, kind)
    for data in (b"\xff", b"\x0a\xff\xff\xff\xff\x7f", b"\x0f", b"\x80", b"\x0b", b"\x0c"):
        long = data * COUNTED_BYTES
        check_counts(kind, long[: COUNTED_BYTES + 7])
        assert isinstance(read(long), Unreadable)


def test_a_long_text_and_unknown_fields_are_read() -> None:
    text = "a\x80é" * COUNTED_BYTES
    request = inference_pb2.GenerateRequest(prompt=inference_pb2.Prompt(text=text))
    data = request.SerializeToString() + b"\xfa\x3f\x03abc" + b"\xf5\x3f1234" + b"\xf1\x3f12345678"
    found = _parser(inference_pb2.GenerateRequest.FromString, request.DESCRIPTOR)(data)
    assert isinstance(found, inference_pb2.GenerateRequest) and found.prompt.text == text
