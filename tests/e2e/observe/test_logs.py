"""Every line of every service is one JSON object, and names the request that it is about."""

import contextlib
import secrets
import socket

import httpx

from tests.e2e.observe.conftest import Observed

SERVICES = ("gateway", "scheduler_svc", "worker_svc")
SECRET = "Peppermint Locomotive"
FIELDS = {"time", "level", "logger", "message", "service", "pid"}


def test_each_line_is_json_and_none_holds_a_prompt(observed: Observed) -> None:
    observed.complete(prompt=SECRET)
    with contextlib.suppress(httpx.HTTPStatusError):
        observed.complete(prompt=SECRET, temperature=-SECRET.__len__())
    for service in SERVICES:
        lines = observed.lines(service)
        assert all(line.keys() >= FIELDS for line in lines)
        assert {line["service"] for line in lines} == {service.removesuffix("_svc")}
        assert SECRET not in observed.product.read_log(service)


def test_lines_about_a_request_name_it_and_its_trace(observed: Observed) -> None:
    request_id, trace_id = f"logged-{secrets.token_hex(4)}", secrets.token_hex(16)
    parent = f"00-{trace_id}-{secrets.token_hex(8)}-01"
    observed.complete({"x-request-id": request_id, "traceparent": parent})
    for service in ("gateway", "scheduler_svc"):
        about = [line for line in observed.lines(service) if line.get("request_id") == request_id]
        assert about and {line.get("trace_id") for line in about} == {trace_id}, service
        assert all("ended" in line["message"] for line in about)


def test_a_refusal_names_the_request_and_not_what_it_asked(observed: Observed) -> None:
    request_id = f"refused-{secrets.token_hex(4)}"
    with contextlib.suppress(httpx.HTTPStatusError):
        observed.complete({"x-request-id": request_id}, temperature="hot")
    (line,) = [one for one in observed.lines("gateway") if one.get("request_id") == request_id]
    assert "refused" in line["message"] and "temperature" in line["message"]


def test_bytes_that_are_no_text_do_not_break_a_line(observed: Observed) -> None:
    odd = b"bad\xff\xfe\x85id"
    with socket.create_connection(("127.0.0.1", observed.product.http_port)) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
            b"x-request-id: " + odd + b"\r\ncontent-type: application/json\r\n"
            b"content-length: 2\r\n\r\n{}"
        )
        answer = b""
        while part := connection.recv(65536):
            answer += part
    assert answer.startswith(b"HTTP/1.1 400")
    last = observed.lines("gateway")[-1]
    assert "refused" in last["message"] and last["request_id"].startswith("req-")


def test_steps_have_a_line_each(observed: Observed) -> None:
    logger = "scheduler_svc.steps"
    before = [line for line in observed.lines("scheduler_svc") if line["logger"] == logger]
    observed.complete(prompt="A step is a line of the log", max_tokens=9)
    after = [line for line in observed.lines("scheduler_svc") if line["logger"] == logger]
    new = [line for line in after[len(before) :] if line["tokens"]]
    assert sum(line["tokens"] - line["prefill_tokens"] for line in new) >= 8
    numbers = [line["step"] for line in after]
    assert numbers == sorted(set(numbers)), "one line a step"
    for line in new:
        assert 0 < line["tokens"] <= line["budget"] and line["free_blocks"] < line["blocks"]
        assert line["running"] == 1 and line["waiting"] == line["preempted"] == 0
        assert (
            f"step {line['step']}: {line['tokens']} of {line['budget']} tokens" in line["message"]
        )
