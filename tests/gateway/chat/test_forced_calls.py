"""Required tool calls: the grammar that enforces them, and the parsing of the answer."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import tokenizers

from pagewire.v1 import types_pb2
from wire.grammar import new_matcher, read_vocabulary

pytestmark = pytest.mark.asyncio(loop_scope="module")

ROUTE = "/v1/chat/completions"
USER = {"role": "user", "content": "Weather in Paris?"}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
ARGUMENTS = '{"city": "Paris"}'
QUOTED = 'say "é"'


@pytest.fixture
def tools(weather: dict[str, Any]) -> list[Any]:
    """Three tools: one with a schema, one whose schema has definitions, one without."""
    number = {
        "type": "object",
        "properties": {"n": {"$ref": "#/$defs/number"}},
        "required": ["n"],
        "additionalProperties": False,
        "$defs": {"number": {"type": "integer"}},
    }
    weather["function"]["parameters"]["additionalProperties"] = False
    weather["function"]["strict"] = True
    return [
        weather,
        {"type": "function", "function": {"name": "count", "parameters": number}},
        {"type": "function", "function": {"name": QUOTED}},
    ]


def calls(*pairs: tuple[str, str]) -> str:
    made = (
        f'{{"name": {json.dumps(name, ensure_ascii=False)}, "parameters": {arguments}}}'
        for name, arguments in pairs
    )
    return f"[{', '.join(made)}]"


@pytest.fixture
def follows(running: Any, tokenizer: Any) -> Callable[[str], bool]:
    """A function that says whether the last submitted grammar accepts a complete text."""
    definition = tokenizer.definition()
    plain = tokenizers.Tokenizer.from_str(definition)

    def check(text: str) -> bool:
        vocabulary = read_vocabulary(definition, running.scheduler.model.vocab_size, [1])
        grammar = running.scheduler.submits[-1].sampling.grammar
        matcher = new_matcher(vocabulary, grammar)
        ids = plain.encode(text).ids
        return matcher.validate_tokens(ids) == len(ids) and (
            matcher.consume_tokens(ids) and matcher.is_accepting()
        )

    return check


async def ask(running: Any, **fields: Any) -> Any:
    response = await running.http.post(ROUTE, json={"messages": [USER]} | fields)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


async def test_a_required_call_is_one_or_more_of_the_tools(
    running: Any,
    encode: Callable[[str], list[int]],
    tools: list[Any],
    follows: Callable[[str], bool],
) -> None:
    made = [("get_weather", ARGUMENTS), ("count", '{"n": 3}'), (QUOTED, "{}")]
    running.scheduler.output = encode(calls(*made))
    choice = await ask(running, tools=tools, tool_choice="required")
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    functions = [call["function"] for call in choice["message"]["tool_calls"]]
    assert [(call["name"], call["arguments"]) for call in functions] == made
    assert follows(calls(*made))
    assert follows(calls(made[1]))
    for text in (
        "[]",
        "Hello",
        calls(("other", "{}")),
        calls(("count", '{"n": "3"}')),
        calls(("count", "{}")),
        calls((QUOTED, '{"n": 3}')),
        calls(("get_weather", '{"city": "Paris", "more": 1}')),
    ):
        assert not follows(text), text


async def test_one_call_and_no_more_when_calls_may_not_be_parallel(
    running: Any, tools: list[Any], follows: Callable[[str], bool]
) -> None:
    await ask(running, tools=tools, tool_choice="required", parallel_tool_calls=False)
    one = ("get_weather", ARGUMENTS)
    assert follows(calls(one))
    assert not follows(calls(one, one))


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_named_call_is_its_arguments(
    is_streamed: bool,
    running: Any,
    encode: Callable[[str], list[int]],
    tools: list[Any],
    follows: Callable[[str], bool],
) -> None:
    running.scheduler.output = encode(ARGUMENTS)
    fields = {"tools": tools, "tool_choice": NAMED}
    if is_streamed:
        body = {"messages": [USER], "stream": True} | fields
        response = await running.http.post(ROUTE, json=body)
        lines = [line for line in response.text.splitlines() if line.startswith("data: {")]
        choices = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines]
        pieces = [piece for c in choices for piece in c["delta"].get("tool_calls", ())]
        assert pieces[0]["function"]["name"] == "get_weather"
        assert "".join(piece["function"]["arguments"] for piece in pieces) == ARGUMENTS
        assert choices[-1]["finish_reason"] == "tool_calls"
    else:
        choice = await ask(running, **fields)
        (call,) = choice["message"]["tool_calls"]
        assert call["function"] == {"name": "get_weather", "arguments": ARGUMENTS}
        assert choice["finish_reason"] == "tool_calls"
    assert follows(ARGUMENTS)
    assert not follows('{"town": "Paris"}')


@pytest.mark.parametrize("output", ["<think>\nHm.", "<think>\nHm.\n</think>\n\n"])
async def test_an_answer_that_ends_before_its_named_call_has_none(
    output: str, running: Any, encode: Callable[[str], list[int]], tools: list[Any]
) -> None:
    running.scheduler.output = encode(output)
    running.scheduler.end = {"reason": types_pb2.FINISH_REASON_LENGTH}
    choice = await ask(running, tools=tools, tool_choice=NAMED)
    assert choice["message"]["reasoning_content"] == "Hm."
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "length"


async def test_what_contradicts_a_call_or_cannot_hold_it_is_refused_by_its_place(
    running: Any, tools: list[Any]
) -> None:
    bad = {"type": "object", "properties": {"a": {"type": "no such type"}}}
    bad_tool = {"type": "function", "function": {"name": "bad", "parameters": bad, "strict": True}}
    json_object = {"response_format": {"type": "json_object"}}
    cases: dict[str, dict[str, Any]] = {
        "ignore_eos": {"tools": tools, "tool_choice": "required", "ignore_eos": True},
        "tools[1].function.parameters.properties.a": {
            "tools": [tools[0], bad_tool],
            "tool_choice": "required",
        },
    }
    for field, fields in cases.items():
        response = await running.http.post(ROUTE, json={"messages": [USER]} | fields)
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == field
    assert not running.scheduler.submits
    silent = {"tools": tools[1:], "tool_choice": "none"} | json_object
    await ask(running, **silent)
    assert running.scheduler.submits[0].sampling.grammar


async def test_json_comes_after_the_reasoning_that_the_prompt_has_opened(
    running: Any, encode: Callable[[str], list[int]]
) -> None:
    running.scheduler.output = encode(ARGUMENTS)
    messages = [USER, {"role": "assistant", "content": "<think>"}]
    fields: dict[str, Any] = {"messages": messages, "continue_final_message": True}
    choice = await ask(running, **fields)
    assert choice["message"]["reasoning_content"] == ARGUMENTS
    running.scheduler.output = encode(f"Hm.</think>{ARGUMENTS}")
    choice = await ask(running, response_format={"type": "json_object"}, **fields)
    assert choice["message"]["content"] == ARGUMENTS
    assert choice["message"]["reasoning_content"] == "Hm."
