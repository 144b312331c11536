"""One request is one trace in a real collector, through all services, whatever dies."""

import secrets
import time

import httpx
import pytest

from tests.e2e.observe.conftest import Observed
from tests.otlp_sink import Received
from tests.pace import patience

SECRET = "Marmalade Zeppelin"  # a prompt that must not be told
WHOLE = {
    ("gateway", "tokenize"),
    ("gateway", "stream"),
    ("scheduler", "schedule"),
    ("scheduler", "prefill"),
    ("scheduler", "decode"),
    ("worker", "compute"),
    ("worker", "prefill"),
    ("worker", "decode"),
}


def new_trace(flags: str = "01") -> tuple[str, str, str]:
    """(trace id, id of the caller's span, traceparent)."""
    trace_id, span_id = secrets.token_hex(16), secrets.token_hex(8)
    return trace_id, span_id, f"00-{trace_id}-{span_id}-{flags}"


def named(spans: list[Received], service: str, name: str) -> Received:
    (found,) = [r for r in spans if r.service == f"pagewire-{service}" and r.span.name == name]
    return found


def test_a_request_is_one_trace_through_all_services(observed: Observed) -> None:
    trace_id, caller, traceparent = new_trace()
    headers = {"traceparent": traceparent, "tracestate": "vendor=7", "x-request-id": "traced-1"}
    answer = observed.complete(headers, prompt=SECRET, max_tokens=40)
    model = answer["model"]
    spans = observed.sink.wait_for(
        trace_id, lambda names: names >= WHOLE and ("gateway", f"text_completion {model}") in names
    )
    root = named(spans, "gateway", f"text_completion {model}")
    schedule, compute = named(spans, "scheduler", "schedule"), named(spans, "worker", "compute")
    assert root.span.parent_span_id.hex() == caller
    assert schedule.span.parent_span_id == root.span.span_id
    assert compute.span.parent_span_id == schedule.span.span_id
    assert {r.span.trace_state for r in (root, schedule, compute)} == {"vendor=7"}
    told = root.attributes
    usage = answer["usage"]
    assert told["gen_ai.usage.output_tokens"] == usage["completion_tokens"] == 40
    assert told["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert told["gen_ai.request.model"] == model
    assert told["pagewire.request.id"] == "traced-1"
    finish = told["gen_ai.response.finish_reasons"]
    assert [value.string_value for value in finish.values] == ["length"]  # type: ignore[attr-defined]
    decode = named(spans, "worker", "decode")
    assert decode.attributes["pagewire.tokens"] == 39  # the first came with the prefill
    assert [e.name for e in named(spans, "worker", "prefill").span.events] == ["chunk"]
    assert len(spans) < 15, "no span for each token"
    for one in spans:  # on one clock, each within the root
        assert root.span.start_time_unix_nano <= one.span.start_time_unix_nano + 5_000_000
        assert one.span.start_time_unix_nano <= one.span.end_time_unix_nano
    assert not any(SECRET.encode() in raw for raw in observed.sink.raw)


def test_a_trace_goes_on_after_its_worker_was_killed(observed: Observed) -> None:
    trace_id, _, traceparent = new_trace()
    body = {"prompt": "Long ago", "max_tokens": 700, "ignore_eos": True, "stream": True}
    url, headers = f"{observed.product.url}/v1/completions", {"traceparent": traceparent}
    with httpx.stream("POST", url, json=body, headers=headers, timeout=patience(120)) as response:
        lines = response.iter_lines()
        for _ in range(6):
            next(lines)
        observed.product.kill_worker()
        observed.product.start_worker()
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert '"error":' not in "".join(rest)  # a token may be "error"
    spans = observed.sink.wait_for(
        trace_id, lambda names: names >= WHOLE and ("scheduler", "recovery") in names
    )
    schedule = named(spans, "scheduler", "schedule")
    assert "recovery" in [event.name for event in schedule.span.events]
    # The killed worker took its own span along; its successor's begins after the recovery.
    recovery, compute = named(spans, "scheduler", "recovery"), named(spans, "worker", "compute")
    assert compute.span.parent_span_id == schedule.span.span_id
    assert compute.span.start_time_unix_nano >= recovery.span.start_time_unix_nano


def test_metadata_of_a_call_carries_a_trace_too(observed: Observed) -> None:
    trace_id, _, traceparent = new_trace()
    with observed.product.sdk() as client:
        metadata = {"traceparent": traceparent}
        client.generate("Hello", max_tokens=4, ignore_eos=True, metadata=metadata)
    observed.sink.wait_for(trace_id, lambda names: names >= WHOLE)


def test_what_the_caller_does_not_sample_is_not_traced(observed: Observed) -> None:
    hidden, _, unsampled = new_trace("00")
    observed.complete({"traceparent": unsampled})
    seen, _, sampled = new_trace()
    observed.complete({"traceparent": sampled})
    observed.sink.wait_for(seen, lambda names: names >= WHOLE)
    assert observed.sink.of(hidden) == []


def test_an_invalid_traceparent_begins_a_trace(observed: Observed) -> None:
    observed.complete({"traceparent": f"00-{'0' * 32}-{'1' * 16}-01", "x-request-id": "bad-parent"})
    deadline_s = time.monotonic() + patience(20)
    while not (found := _of_request(observed, "bad-parent")):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    roots = [one for one in found if one.service == "pagewire-gateway"]
    assert all(not one.span.parent_span_id for one in roots)
    assert not any(set(one.span.trace_id) == {0} for one in found)


def _of_request(observed: Observed, request_id: str) -> list[Received]:
    received = observed.sink.received
    return [one for one in received if one.attributes.get("pagewire.request.id") == request_id]


def test_a_refusal_is_told_by_its_code(observed: Observed) -> None:
    trace_id, _, traceparent = new_trace()
    request = {"traceparent": traceparent}
    with pytest.raises(httpx.HTTPStatusError) as refused:
        observed.complete(request, prompt=[10**6])
    assert refused.value.response.status_code == 400
    (root,) = observed.sink.wait_for(trace_id, bool)
    assert root.attributes["error.type"] == "invalid_value"


def test_a_dead_collector_costs_a_warning_and_nothing_else(observed: Observed) -> None:
    observed.sink.stop()
    try:
        for _ in range(3):  # each of them a batch of its own that fails
            began_s = time.monotonic()
            observed.complete()
            took_s = time.monotonic() - began_s
            assert took_s < patience(5.0)
            time.sleep(0.3)
        services = ("gateway", "scheduler_svc", "worker_svc")
        deadline_s = time.monotonic() + patience(30)
        while not all(_warnings(observed, service) for service in services):
            assert time.monotonic() < deadline_s
            time.sleep(0.1)
        for _ in range(3):
            observed.complete()
            time.sleep(1.2)  # the time limit of an attempt
        assert [len(_warnings(observed, service)) for service in services] == [1, 1, 1]
        told = {line["logger"] for service in services for line in observed.lines(service)}
        assert not [name for name in told if name.startswith("opentelemetry")]
    finally:
        observed.sink.start()
    trace_id, _, traceparent = new_trace()
    deadline_s = time.monotonic() + patience(60)
    while not observed.sink.of(trace_id):  # a channel that was refused waits before it tries again
        assert time.monotonic() < deadline_s
        observed.complete({"traceparent": traceparent})
        time.sleep(0.5)


def _warnings(observed: Observed, service: str) -> list[str]:
    lines = observed.lines(service)
    return [line["message"] for line in lines if "traces are lost" in line["message"]]
