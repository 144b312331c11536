"""Cases of the fuzzers: what is drawn, kept and judged, without services."""

import json
import random
from collections import Counter
from pathlib import Path

import grpc
import pytest

from pagewire.v1 import worker_pb2
from tests.e2e.fuzz import (
    grpc_target,
    http2_frames,
    http_target,
    proto_messages,
    step_target,
    values,
)
from tests.e2e.fuzz.case import CORPUS, Case, CaseVerdict, load
from tests.e2e.fuzz.json_bodies import VALID, Bodies
from tests.e2e.fuzz.report import MAX_KEPT, FuzzReport


@pytest.mark.parametrize("payload", [b'{"a": 1}', bytes(range(256))])
def test_a_kept_case_is_the_same_when_it_is_read_again(payload: bytes, tmp_path: Path) -> None:
    case = Case("http", "/v1/completions", payload)
    case.save(tmp_path, "why")
    assert list(load(tmp_path)) == [case]


def test_the_corpus_can_be_read_and_says_why_each_case_is_there() -> None:
    for folder in (CORPUS, CORPUS / "pending"):
        assert all(case.payload for case in load(folder))
        assert all(json.loads(path.read_text())["why"] for path in folder.glob("*.json"))


def test_a_seed_draws_the_same_bodies_in_every_run() -> None:
    bodies = Bodies()
    one, two, other = random.Random(1), random.Random(1), random.Random(2)
    drawn = [bodies.draw(one) for _ in range(200)]
    assert drawn == [bodies.draw(two) for _ in range(200)]
    assert drawn != [bodies.draw(other) for _ in range(200)]


def test_bodies_go_to_every_route_and_most_are_json() -> None:
    rng, bodies = random.Random(1), Bodies()
    drawn = [bodies.draw(rng) for _ in range(500)]
    assert {case.name for case in drawn} == {route for route, _ in VALID}
    parsed = Counter[bool]()
    for case in drawn:
        try:
            json.loads(case.payload)
            parsed[True] += 1
        except (ValueError, RecursionError):
            parsed[False] += 1
    assert parsed[True] > 350 and parsed[False] > 0


def test_every_field_of_a_message_is_reached_with_its_edges() -> None:
    rng, seen = random.Random(1), set()
    for _ in range(3000):
        message = worker_pb2.SchedulerOutput()
        proto_messages.mutate(message, rng)
        seen |= {field.name for field, _ in message.ListFields()}
    assert seen == {field.name for field in worker_pb2.SchedulerOutput.DESCRIPTOR.fields}
    assert max(values.INTEGERS) > 2**64 and min(values.INTEGERS) <= -(2**63)


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\n{}", CaseVerdict("200")),
        (b"", CaseVerdict("closed", "the connection was closed without an answer", was_lost=True)),
        (
            b'HTTP/1.1 400 Bad\r\n\r\n{"error": {"param": "n", "code": "c", "message": "n: bad"}}',
            CaseVerdict("400"),
        ),
        (
            b'HTTP/1.1 400 Bad\r\n\r\n{"error": {"param": null, "code": "c", "message": "bad"}}',
            CaseVerdict("400", "names no field: bad"),
        ),
    ],
)
def test_a_refusal_over_http_must_name_its_field(answer: bytes, verdict: CaseVerdict) -> None:
    assert http_target.judge(answer) == verdict


def test_an_internal_error_is_a_problem_even_within_a_stream() -> None:
    assert http_target.judge(b"HTTP/1.1 500 Bad\r\n\r\n{}").problem
    inside = b'HTTP/1.1 200 OK\r\n\r\ndata: {"error": {"code":"internal_error"}}'
    assert http_target.judge(inside.replace(b'code":"', b'code":"')).problem


def test_a_status_of_the_worker_must_name_its_field() -> None:
    refused = grpc.StatusCode.INVALID_ARGUMENT
    assert not step_target._judge(refused, "new_sequences[0].slot: 4").problem
    assert step_target._judge(refused, "something is wrong").problem
    assert step_target._judge(grpc.StatusCode.UNKNOWN, "slot: 4").problem


def test_a_status_of_a_service_must_name_a_field_of_its_messages() -> None:
    names = grpc_target._field_names(grpc_target.TOKENS.values())
    assert {"min_tokens", "prompt_token_ids", "timeout_s", "token_id"} <= names


def test_a_report_keeps_the_first_cases_of_each_problem(tmp_path: Path) -> None:
    report = FuzzReport(tmp_path)
    for index in range(10):
        report.add(Case("http", "/x", str(index).encode()), CaseVerdict("500", f"problem {index}"))
    assert not report.is_clean
    assert len(list(tmp_path.iterdir())) == MAX_KEPT
    assert "10 x http /x: problem _" in str(report)


def test_a_frame_has_its_length_kind_and_stream() -> None:
    assert http2_frames.frame(http2_frames.PING, b"12345678") == b"\0\0\x08\x06\0\0\0\0\x0012345678"
    long = http2_frames.header_block([(b"a", b"x" * 1000)])
    assert long == b"\x10\x01a\x7f\xe9\x06" + b"x" * 1000
