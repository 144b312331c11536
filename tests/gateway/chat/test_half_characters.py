"""Values that JSON may hold and text may not: halves of characters, and numbers without bounds."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from gateway.chat.conversation import parse_arguments
from gateway.chat.families.typed_values import as_json
from gateway.text.unicode import to_json, whole_characters
from tests.gateway.http_calls import error_of, post

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT, RESPONSE, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
USER = {"role": "user", "content": "Weather?"}
FUNCTION = {"name": "f", "parameters": {"type": "object"}}
TOOLS: dict[str, list[dict[str, Any]]] = {
    CHAT: [{"type": "function", "function": FUNCTION}],
    RESPONSE: [{"type": "function"} | FUNCTION],
    MESSAGES: [{"name": "f", "input_schema": {"type": "object"}}],
}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [USER]},
    RESPONSE: {"input": "Weather?"},
    MESSAGES: {"messages": [USER], "max_tokens": 50},
}
ODD = (r'{"a": "x\ud83d"}', r'{"\uDE00": ["\ud83d\ud83d\ude00"]}', '{"a": 1e999}', '{"a": NaN}')
HALF = "\ud83d"


def calls_of(arguments: str) -> tuple[str, str]:
    """A call as it is streamed, and one whose members come in another order."""
    return (
        f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>',
        f'<tool_call>\n{{"arguments": {arguments}, "name": "f"}}\n</tool_call>',
    )


@pytest.mark.parametrize("arguments", ODD)
@pytest.mark.parametrize("route", TOOLS)
async def test_a_call_with_odd_values_is_told_whole_and_streamed(
    route: str, arguments: str, running: Any, encode: Callable[[str], list[int]]
) -> None:
    for output in calls_of(arguments):
        running.scheduler.output = encode(output)
        body = BODIES[route] | {"tools": TOOLS[route]}
        whole = await post(running, route, body)
        assert "f" in json.dumps(whole)
        streamed = await running.http.post(route, json=body | {"stream": True})
        assert streamed.status_code == 200 and '"error":{' not in streamed.text
        assert "stop" in streamed.text or "completed" in streamed.text


@pytest.mark.parametrize("arguments", ODD)
async def test_such_a_call_may_be_sent_back(
    arguments: str, running: Any, encode: Callable[[str], list[int]]
) -> None:
    for output in calls_of(arguments):
        running.scheduler.output = encode(output)
        body = {"messages": [USER], "tools": TOOLS[CHAT]}
        (choice,) = (await post(running, CHAT, body))["choices"]
        message = choice["message"]
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "a"}
        await post(running, CHAT, body | {"messages": [USER, message, result]})
        body = BODIES[MESSAGES] | {"tools": TOOLS[MESSAGES]}
        answer = {"role": "assistant", "content": (await post(running, MESSAGES, body))["content"]}
        block = {"type": "tool_result", "tool_use_id": answer["content"][0]["id"], "content": "a"}
        turns = [USER, answer, {"role": "user", "content": [block]}]
        await post(running, MESSAGES, body | {"messages": turns})


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("metadata", {"metadata": {"a": HALF}}),
        ("text", {"text": {"format": {"type": "text", "name": HALF}}}),
        (
            "tools",
            {"tools": [TOOLS[RESPONSE][0] | {"description": HALF}], "tool_choice": "none"},
        ),
        ("messages[0].content", {"instructions": HALF, "input": "a"}),
    ],
)
async def test_what_a_response_repeats_must_be_text(
    field: str, fields: dict[str, Any], running: Any
) -> None:
    body = json.dumps(BODIES[RESPONSE] | fields)
    headers = {"content-type": "application/json"}
    response = await running.http.post(RESPONSE, content=body, headers=headers)
    assert error_of(response, 400)["param"] == field


async def test_a_half_is_replaced_where_text_is_needed_and_escaped_where_json_is() -> None:
    assert whole_characters(f"a{HALF}b😀") == "a\ufffdb😀"
    assert to_json({"é": HALF}) == r'{"\u00e9": "\ud83d"}'
    assert to_json({"é": "😀"}) == '{"é": "😀"}'
    assert parse_arguments(r'{"a": "\ud83d"}') == {"a": "\ufffd"}
    assert parse_arguments(r'{"a": "\ud83d\ude00"}') == {"a": "😀"}
    assert parse_arguments('{"a": 1e999}') == '{"a": 1e999}'
    of_object = {"properties": {"a": {"type": "object"}}}
    assert as_json(r'{"é": "\ud83d"}', of_object, "a").isascii()
