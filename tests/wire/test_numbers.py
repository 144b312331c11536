"""Bounds of numbers: every field of every request has one, and nothing outside it passes."""

import math

import pytest
from google.protobuf.descriptor import Descriptor, FileDescriptor, MethodDescriptor
from google.protobuf.message_factory import GetMessageClass

from pagewire.v1 import debug_pb2, embedding_pb2, inference_pb2, scheduler_pb2, worker_pb2
from tests.edges import Path, edges_of, name_of, numbers_in, with_number
from wire.numbers import FLOAT32_MAX, NARROWER, WIDER, BadNumber, bound_of, check_numbers

MODULES = (debug_pb2, embedding_pb2, inference_pb2, scheduler_pb2, worker_pb2)


def _methods() -> list[MethodDescriptor]:
    files: list[FileDescriptor] = [module.DESCRIPTOR for module in MODULES]
    return [m for file in files for s in file.services_by_name.values() for m in s.methods]


REQUESTS: dict[str, Descriptor] = {m.input_type.name: m.input_type for m in _methods()}
FIELDS = [(name, path) for name, kind in REQUESTS.items() for path in numbers_in(kind)]


def test_there_are_requests_and_numbers() -> None:
    assert len(REQUESTS) >= 20 and len(FIELDS) >= 100


def test_every_number_of_every_request_has_a_bound_that_a_column_holds() -> None:
    for name, path in FIELDS:
        bound = bound_of(path[-1])
        assert bound is not None, f"{name}.{name_of(path)}"
        assert math.isfinite(bound.low) and math.isfinite(bound.high)
        wide = path[-1].full_name in WIDER
        assert wide or abs(bound.high) <= (
            2**63 - 1 if isinstance(bound.high, int) else FLOAT32_MAX
        )


def test_every_exception_names_a_field() -> None:
    named = {path[-1].full_name for _, path in FIELDS}
    assert named >= {*WIDER, *NARROWER}


def test_what_is_outside_is_refused_by_name_and_the_rest_passes() -> None:
    for name, path in FIELDS:
        empty = GetMessageClass(REQUESTS[name])()
        bound = bound_of(path[-1])
        assert bound is not None
        for value in edges_of(path[-1]):
            message = with_number(empty, path, value)
            if path[-1].type == path[-1].TYPE_FLOAT:  # as the wire holds it
                value = math.inf if abs(value) > 3.4028235e38 else value
            if bound.low <= value <= bound.high:
                check_numbers(message)
                continue
            with pytest.raises(BadNumber) as caught:
                check_numbers(message)
            assert caught.value.field == _told(path)


def test_a_long_column_is_judged_by_all_its_numbers() -> None:
    ids = [7] * 1000
    ids[500] = 2**31
    request = scheduler_pb2.SchedulerServiceGenerateRequest(prompt_token_ids=ids)
    with pytest.raises(BadNumber, match=r"prompt_token_ids: 2147483648 is outside \[0, 2147483647"):
        check_numbers(request)


def _told(path: Path) -> str:
    """The field as refusals name it: with the lists on the way, without single messages."""
    return "".join(f"{f.name}[0]." for f in path[:-1] if f.is_repeated) + path[-1].name
