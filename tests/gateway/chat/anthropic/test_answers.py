"""POST /v1/messages: whole answers, their events, and errors in Anthropic's form."""

import json
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from pagewire.v1 import types_pb2
from tests.gateway.http_calls import post

pytestmark = pytest.mark.asyncio(loop_scope="module")

ROUTE = "/v1/messages"
TOOL = {"name": "get_weather", "input_schema": {"type": "object"}}
ARGUMENTS = {"city": "Paris"}
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {json.dumps(ARGUMENTS)}}}\n</tool_call>'
ANSWER = f"<think>\nA tool will know.\n</think>\n\nWait.\n{CALL}\n{CALL}"


def body(**fields: Any) -> dict[str, Any]:
    asked = {"model": "tiny", "max_tokens": 99, "messages": [{"role": "user", "content": "Hello"}]}
    return asked | fields


def events_of(text: str) -> list[dict[str, Any]]:
    found = []
    for block in text.strip().split("\n\n"):
        kind, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert kind == f"event: {event['type']}"
        found.append(event)
    return found


def assembled(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that the events tell, checked for their order."""
    message: dict[str, Any] = {}
    texts: list[str] | None = None
    for event in events:
        match event["type"]:
            case "message_start":
                assert not message
                message = event["message"]
            case "content_block_start":
                assert texts is None
                assert event["index"] == len(message["content"])
                message["content"].append(event["content_block"])
                texts = []
            case "content_block_delta":
                assert texts is not None
                (name,) = event["delta"].keys() - {"type"}
                texts.append(event["delta"][name])
            case "content_block_stop":
                assert texts is not None
                block = message["content"][event["index"]]
                text = "".join(texts)
                is_call = block["type"] == "tool_use"
                block["input" if is_call else block["type"]] = json.loads(text) if is_call else text
                texts = None
            case "message_delta":
                assert texts is None
                message |= event["delta"] | {"usage": event["usage"]}
    assert [event["type"] for event in events][:2] == ["message_start", "ping"]
    assert events[-1]["type"] == "message_stop"
    return message


def said(message: dict[str, Any]) -> dict[str, Any]:
    """A message without its ids, and without the tokens of its thoughts: where several tokens come
    at once, one of them may be of thoughts and text together.
    """
    blocks = [{k: v for k, v in block.items() if k != "id"} for block in message["content"]]
    usage = {k: v for k, v in message["usage"].items() if k != "output_tokens_details"}
    return message | {"id": "", "content": blocks, "usage": usage}


@pytest.mark.parametrize("tokens_per_step", [1, 7])
async def test_thinking_text_and_calls_are_told_whole_and_streamed_alike(
    tokens_per_step: int, running: Any, encode: Callable[[str], list[int]]
) -> None:
    running.scheduler.output = encode(ANSWER)
    running.scheduler.tokens_per_step = tokens_per_step
    whole = await post(running, ROUTE, body(tools=[TOOL]))
    streamed = await running.http.post(ROUTE, json=body(tools=[TOOL], stream=True))
    assert streamed.headers["content-type"].startswith("text/event-stream")
    assert said(assembled(events_of(streamed.text))) == said(whole)
    thought, text, *calls = whole["content"]
    assert thought == {"type": "thinking", "thinking": "A tool will know.", "signature": ""}
    assert text == {"type": "text", "text": "Wait."}
    assert [(call["name"], call["input"]) for call in calls] == [("get_weather", ARGUMENTS)] * 2
    assert len({call["id"] for call in calls}) == 2
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("tool_use", None)
    assert (whole["type"], whole["role"], whole["model"]) == ("message", "assistant", "tiny")
    num_prompt = len(running.scheduler.prompt_of(0))
    usage = whole["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (num_prompt - 3, 3)
    assert usage["output_tokens"] == len(encode(ANSWER))
    assert 0 < usage["output_tokens_details"]["thinking_tokens"] < usage["output_tokens"]


async def test_a_stream_begins_with_what_the_prompt_cost(running: Any) -> None:
    streamed = await running.http.post(ROUTE, json=body(stream=True))
    start = events_of(streamed.text)[0]["message"]
    total = start["usage"]["input_tokens"] + start["usage"]["cache_read_input_tokens"]
    assert total == len(running.scheduler.prompt_of(0))
    assert start["content"] == []


async def test_parallel_calls_can_be_disabled(
    running: Any, encode: Callable[[str], list[int]]
) -> None:
    running.scheduler.output = encode(f"{CALL}\n{CALL}")
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    answer = await post(running, ROUTE, body(tools=[TOOL], tool_choice=choice))
    assert [block["type"] for block in answer["content"]] == ["tool_use"]


async def test_omitted_thoughts_are_left_out(
    running: Any, encode: Callable[[str], list[int]]
) -> None:
    running.scheduler.output = encode(ANSWER)
    hidden = {"type": "adaptive", "display": "omitted"}
    answer = await post(running, ROUTE, body(thinking=hidden))
    assert [block["type"] for block in answer["content"]] == ["text"]


async def test_the_stop_sequence_is_named(running: Any) -> None:
    answer = await post(running, ROUTE, body(stop_sequences=["x", " wor"]))
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", " wor")
    assert answer["content"] == [{"type": "text", "text": "Hello"}]


async def test_the_two_limits_are_told_apart(
    running: Any, encode: Callable[[str], list[int]]
) -> None:
    running.scheduler.end = {"reason": types_pb2.FINISH_REASON_LENGTH}
    num_tokens = len(encode("Hello world"))
    answer = await post(running, ROUTE, body(max_tokens=num_tokens))
    assert answer["stop_reason"] == "max_tokens"
    answer = await post(running, ROUTE, body())
    assert answer["stop_reason"] == "model_context_window_exceeded"


async def test_a_call_that_was_cut_off_keeps_its_text(
    running: Any, encode: Callable[[str], list[int]]
) -> None:
    running.scheduler.output = encode(CALL[:60])
    running.scheduler.end = {"reason": types_pb2.FINISH_REASON_LENGTH}
    answer = await post(running, ROUTE, body(tools=[TOOL]))
    (call,) = answer["content"]
    assert list(call["input"]) == ["INVALID_JSON"]
    assert '{"city": "Paris"}'.startswith(call["input"]["INVALID_JSON"])
    turns = [*body()["messages"], {"role": "assistant", "content": [call]}, *body()["messages"]]
    await post(running, ROUTE, body(messages=turns))


async def test_an_aborted_answer_is_an_error(running: Any) -> None:
    running.scheduler.end = {"reason": types_pb2.FINISH_REASON_ABORT}
    response = await running.http.post(ROUTE, json=body())
    assert response.status_code == 499
    streamed = await running.http.post(ROUTE, json=body(stream=True))
    last = events_of(streamed.text)[-1]
    assert (last["type"], last["error"]["code"]) == ("error", "cancelled")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, 400, "invalid_request_error"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, 429, "rate_limit_error"),
        (grpc.StatusCode.UNAVAILABLE, 529, "overloaded_error"),
        (grpc.StatusCode.DEADLINE_EXCEEDED, 504, "timeout_error"),
        (grpc.StatusCode.INTERNAL, 500, "api_error"),
    ],
)
async def test_the_scheduler_refuses_in_anthropics_form(
    stream: bool, code: grpc.StatusCode, status: int, kind: str, running: Any
) -> None:
    running.scheduler.refuse(code, "no")
    response = await running.http.post(ROUTE, json=body(stream=stream))
    assert response.status_code == status
    assert response.json()["type"] == "error"
    assert response.json()["error"]["type"] == kind
    assert ("retry-after" in response.headers) is (status in (429, 529))


async def test_other_errors_have_the_form_too(start: Any) -> None:
    running = await start(api_key="secret")
    request = running.http.build_request("POST", ROUTE, json=body())
    response = await running.http.send(request)
    assert response.status_code == 401
    assert response.json()["error"]["type"] == "authentication_error"
    key = {"x-api-key": "secret", "anthropic-version": "2023-06-01"}
    wrong = key | {"x-api-key": "other"}
    both = key | {"authorization": "Bearer other"}
    for headers, status in ((key, 200), (wrong, 401), (both, 401)):
        response = await running.http.post(ROUTE, json=body(), headers=headers)
        assert response.status_code == status, headers
    response = await running.http.post(ROUTE, json=body(model="other"), headers=key)
    assert response.json()["error"]["type"] == "not_found_error"
    response = await running.http.post(ROUTE, content=b"{", headers=key)
    assert response.json()["error"]["type"] == "invalid_request_error"
    response = await running.http.get(ROUTE, headers=key)
    assert (response.status_code, response.json()["type"]) == (405, "error")
    response = await running.http.get(f"{ROUTE}/batches", headers=key)
    assert response.json()["error"]["type"] == "not_found_error"
    response = await running.http.get("/v1/models", headers=key)
    assert response.status_code == 200
