"""POST /v1/messages: what the chat template gets, and what is refused, by name."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.gateway.http_calls import post

pytestmark = pytest.mark.asyncio(loop_scope="module")

ROUTE, COUNT = "/v1/messages", "/v1/messages/count_tokens"
USER = {"role": "user", "content": "Hello"}
USE = {"type": "tool_use", "id": "t1", "name": "get_weather", "input": {"city": "Paris"}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "Sunny"}
TOOL = {"name": "get_weather", "description": "Weather", "input_schema": {"type": "object"}}
TEXT = {"type": "text", "text": "Hello"}
IMAGE = {"type": "image", "source": {"type": "url", "url": "http://example.org/a.png"}}
CONTROL = {"cache_control": {"type": "ephemeral"}}


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "max_tokens": 8, "messages": [USER]} | fields


def asked(*blocks: dict[str, Any], role: str = "user") -> dict[str, Any]:
    return {"messages": [USER, {"role": role, "content": list(blocks)}, USER]}


async def prompt_of(running: Any, decode: Callable[[list[int]], str], fields: Any) -> str:
    await post(running, ROUTE, body(**fields))
    return decode(running.scheduler.prompt_of(-1))


@pytest.fixture
def decode(tokenizer: Any) -> Callable[[list[int]], str]:
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=False)


def shown(*turns: tuple[str, str]) -> str:
    return "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"system": "Be brief."}, shown(("system", "Be brief."), ("user", "Hello"))),
        (
            {"system": [TEXT | CONTROL, TEXT]},
            shown(("system", "Hello\nHello"), ("user", "Hello")),
        ),
        ({"system": ""}, shown(("user", "Hello"))),
        (asked(TEXT, TEXT), shown(("user", "Hello"), ("user", "Hello\nHello"))),
        (
            asked({"type": "thinking", "thinking": "Hm.", "signature": ""}, TEXT, role="assistant"),
            "<think>\nHm.\n</think>\n\nHello<|im_end|>",
        ),
        (
            asked(TEXT, USE, role="assistant"),
            'Hello<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}',
        ),
        (
            asked(USE | {"input": {"INVALID_JSON": '{"city": "Pa'}}, role="assistant"),
            r'"arguments": "{\"city\": \"Pa"}',
        ),
        (asked(RESULT, TEXT), shown(("tool [t1]", "Sunny"), ("user", "Hello"))),
        (asked(RESULT | {"is_error": True}), shown(("tool [t1]", "Error: Sunny"))),
        (asked(RESULT | {"content": [TEXT | CONTROL]}), shown(("tool [t1]", "Hello"))),
        (asked({"type": "tool_result", "tool_use_id": "t1"}), shown(("tool [t1]", ""))),
        (asked(TEXT, role="system"), shown(("system", "Hello"), ("user", "Hello"))),
        ({"thinking": {"type": "disabled"}}, "assistant\n<think>\n\n</think>\n\n"),
        ({"tools": [TOOL | CONTROL]}, '"name": "get_weather", "description": "Weather"'),
    ],
)
async def test_the_chat_template_gets_what_was_said(
    fields: dict[str, Any], expected: str, running: Any, decode: Any
) -> None:
    assert expected in await prompt_of(running, decode, fields)


async def test_a_last_turn_of_the_assistant_is_continued(running: Any, decode: Any) -> None:
    turns = {"messages": [USER, {"role": "assistant", "content": "The capital"}]}
    prompt = await prompt_of(running, decode, turns)
    assert prompt.endswith("<|im_start|>assistant\nThe capital")


async def test_sampling_and_stops_reach_the_scheduler(running: Any) -> None:
    fields = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "metadata": {"user_id": "alice"}}
    await post(running, ROUTE, body(**fields))
    submit = running.scheduler.submits[-1]
    sampling = submit.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 7)
    assert (sampling.max_tokens, submit.tenant) == (8, "alice")


@pytest.mark.parametrize(
    ("choice", "has_tools", "has_grammar"),
    [
        ({"type": "auto"}, True, False),
        ({"type": "none"}, False, False),
        ({"type": "any"}, True, True),
        ({"type": "tool", "name": "get_weather"}, True, True),
    ],
)
async def test_the_choice_of_tools(
    choice: dict[str, Any], has_tools: bool, has_grammar: bool, running: Any, decode: Any
) -> None:
    prompt = await prompt_of(running, decode, {"tools": [TOOL], "tool_choice": choice})
    assert ("get_weather" in prompt) is has_tools
    assert bool(running.scheduler.submits[-1].sampling.grammar) is has_grammar


REFUSED: list[tuple[dict[str, Any], str]] = [
    (asked(IMAGE), "messages[1].content[0].type"),
    (asked({"type": "document", "source": {}}), "messages[1].content[0].type"),
    (asked(RESULT | {"content": [TEXT, IMAGE]}), "messages[1].content[0].content[1].type"),
    (asked(USE), "messages[1].content[0].type"),
    (asked(RESULT, role="assistant"), "messages[1].content[0].type"),
    (asked(USE | {"input": "x"}, role="assistant"), "messages[1].content[0].input"),
    (asked(USE | {"name": ""}, role="assistant"), "messages[1].content"),
    (asked(TEXT | {"text": 5}), "messages[1].content[0].text"),
    (asked("Hello"), "messages[1].content[0].type"),  # type: ignore[arg-type]
    (asked(), "messages[1].content"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"messages": []}, "messages"),
    ({"messages": [USER, {"role": "assistant", "content": [USE]}]}, "messages"),
    ({"messages": "Hello"}, "messages"),
    ({"system": [IMAGE]}, "system[0].type"),
    ({"system": "\ud800"}, "system"),
    ({"stop_sequences": [""]}, "stop_sequences[0]"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"temperature": 3.0}, "temperature"),
    ({"tools": [{"type": "no_such_tool", "name": "f"}]}, "tools[0].type"),
    ({"tools": [TOOL | {"name": ""}]}, "tools[0].name"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"thinking": {"type": "enabled", "budget_tokens": 4}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "between_tools"}}, "thinking.type"),
    ({"output_config": {"effort": "extreme"}}, "output_config.effort"),
    (
        {"output_config": {"format": {"type": "json_schema", "schema": {"type": 5}}}},
        "output_config.format.schema",
    ),
    ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
    ({"container": "c"}, "container"),
    ({"speed": "fast"}, "speed"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=lambda value: str(value)[:60])
async def test_what_cannot_be_done_is_refused_by_name(
    fields: dict[str, Any], param: str, running: Any
) -> None:
    text = json.dumps(body(**fields))  # ASCII: a lone surrogate has no UTF-8
    kind = {"content-type": "application/json"}
    response = await running.http.post(ROUTE, content=text, headers=kind)
    assert response.status_code == 400, response.text
    refusal = response.json()
    assert (refusal["type"], refusal["error"]["type"]) == ("error", "invalid_request_error")
    assert refusal["error"]["param"].startswith(param)
    assert refusal["error"]["message"].startswith(param)
    assert not running.scheduler.submits


@pytest.mark.parametrize(
    "fields",
    [
        {"thinking": {"type": "enabled", "budget_tokens": 8}},
        {"thinking": {"type": "adaptive"}},
        {"thinking": None, "metadata": None, "tool_choice": None, "system": None},
        {"tool_choice": {"type": "auto"}, "tools": []},
        {"output_config": {"effort": "high"}},
        {"service_tier": "auto", "diagnostics": {"previous_message_id": None}, "mcp_servers": []},
        CONTROL,
    ],
)
async def test_what_asks_for_nothing_is_accepted(fields: dict[str, Any], running: Any) -> None:
    response = await running.http.post(ROUTE, json=body(**fields))
    assert response.status_code == 200, response.text
    assert "x-pagewire-warning" not in response.headers


async def test_an_unknown_field_is_accepted_with_a_warning(running: Any) -> None:
    response = await running.http.post(ROUTE, json=body(something=1))
    assert response.status_code == 200
    assert "something" in response.headers["x-pagewire-warning"]


@pytest.mark.parametrize(
    "fields",
    [{}, {"system": "Be brief."}, {"tools": [TOOL]}, {"thinking": {"type": "disabled"}}],
)
async def test_tokens_are_counted_as_they_are_used(fields: dict[str, Any], running: Any) -> None:
    counted = await post(running, COUNT, {"messages": [USER]} | fields)
    await post(running, ROUTE, body(**fields))
    assert counted == {"input_tokens": len(running.scheduler.prompt_of(-1))}


async def test_a_model_without_thinking_cannot_be_asked_to_think(start: Any) -> None:
    running = await start(reasoning_parser="none")
    response = await running.http.post(
        ROUTE, json=body(thinking={"type": "enabled", "budget_tokens": 1024})
    )
    assert response.json()["error"]["param"].startswith("thinking.")
    assert (await post(running, ROUTE, body(thinking={"type": "disabled"})))["content"]
