"""Strict tools under `auto`, and tools together with a form, over HTTP."""

import json
from typing import Any

import openai
import pydantic
import pytest

from tests.gateway.http_calls import accepts, post, refusal

pytestmark = pytest.mark.asyncio(loop_scope="module")

ROUTE = "/v1/chat/completions"
USER: Any = {"role": "user", "content": "Weather?"}
SCHEMA = {"type": "object", "properties": {"sunny": {"type": "boolean"}}, "required": ["sunny"]}
FORM = {"type": "json_schema", "json_schema": {"name": "w", "schema": SCHEMA}}
GOOD = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
WRONG = '<tool_call>\n{"name": "get_weather", "arguments": {"city": 5}}\n</tool_call>'
SEARCH = {"type": "function", "function": {"name": "search"}}
LOOSE = '<tool_call>\n{"name": "search", "arguments": {"any": [1]}}\n</tool_call>'


def strict(tool: dict[str, Any]) -> dict[str, Any]:
    function = json.loads(json.dumps(tool["function"]))
    function["strict"] = True
    function["parameters"]["additionalProperties"] = False
    return tool | {"function": function}


async def test_a_strict_tool_holds_a_call_to_its_schema_and_leaves_text_free(
    running: Any, tokenizer: Any, weather: Any
) -> None:
    tools = [strict(weather), SEARCH]
    await post(running, ROUTE, {"messages": [USER], "tools": tools})
    for text in ("Sunny.", f"Let me look. {GOOD}", GOOD + GOOD, LOOSE, "<think>\nHm.</think> a"):
        assert accepts(running, tokenizer, text), text
    for text in (WRONG, f"Look: {WRONG}", GOOD.replace("get_weather", "other"), "<tool_call> a"):
        assert not accepts(running, tokenizer, text), text
    one = {"parallel_tool_calls": False}
    await post(running, ROUTE, {"messages": [USER], "tools": tools} | one)
    assert accepts(running, tokenizer, GOOD) and not accepts(running, tokenizer, GOOD + GOOD)


async def test_without_a_strict_tool_or_under_none_nothing_is_held(
    running: Any, weather: Any
) -> None:
    await post(running, ROUTE, {"messages": [USER], "tools": [weather]})
    none = {"tool_choice": "none"}
    await post(running, ROUTE, {"messages": [USER], "tools": [strict(weather)]} | none)
    assert [submit.sampling.grammar for submit in running.scheduler.submits] == ["", ""]


async def test_reasoning_is_still_read_where_a_tool_is_strict(
    running: Any, encode: Any, weather: Any
) -> None:
    running.scheduler.output = encode(f"<think>\nHm.\n</think>\n\n{GOOD}")
    body = {"messages": [USER], "tools": [strict(weather)]}
    (choice,) = (await post(running, ROUTE, body))["choices"]
    assert choice["message"]["reasoning"] == choice["message"]["reasoning_content"] == "Hm."
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "Paris"}'


async def test_with_a_form_the_answer_is_a_valid_call_or_the_form(
    running: Any, tokenizer: Any, encode: Any, weather: Any
) -> None:
    body = {"messages": [USER], "tools": [weather], "response_format": FORM}
    for output, calls, content in ((GOOD, 1, None), ('{"sunny": true}', 0, '{"sunny": true}')):
        running.scheduler.output = encode(output)
        (choice,) = (await post(running, ROUTE, body))["choices"]
        assert len(choice["message"].get("tool_calls", ())) == calls
        assert choice["message"]["content"] == content
        assert accepts(running, tokenizer, output)
    for text in ("Sunny.", WRONG, '{"sunny": 1}', GOOD + " and text", LOOSE):
        assert not accepts(running, tokenizer, text), text
    forced = {"tool_choice": "required"}
    await post(running, ROUTE, body | forced)
    assert not accepts(running, tokenizer, '{"sunny": true}')


async def test_a_schema_that_cannot_be_held_is_refused_by_its_place(
    running: Any, weather: Any
) -> None:
    tool = strict(weather)
    tool["function"]["parameters"]["properties"]["city"] = {"type": "string", "pattern": "(?=a)b"}
    place = "tools[1].function.parameters.properties.city"
    body = {"messages": [USER], "tools": [SEARCH, tool]}
    status, field, _ = await refusal(running, ROUTE, body)
    assert (status, field.startswith(place)) == (400, True)
    tool["function"]["strict"] = False
    await post(running, ROUTE, body)


async def test_the_clients_own_helpers_send_strict_tools(running: Any, encode: Any) -> None:
    class GetWeather(pydantic.BaseModel):
        """The weather."""

        city: str

    class Weather(pydantic.BaseModel):
        """An answer."""

        sunny: bool

    async with openai.AsyncOpenAI(base_url=f"{running.http_url}/v1", api_key="x") as client:
        tool = openai.pydantic_function_tool(GetWeather)
        running.scheduler.output = encode(GOOD.replace("get_weather", "GetWeather"))
        parse = client.chat.completions.parse
        answer = await parse(model="tiny", messages=[USER], tools=[tool], response_format=Weather)
        message = answer.choices[0].message
        assert message.tool_calls is not None
        assert message.tool_calls[0].function.parsed_arguments == GetWeather(city="Paris")
        turns = [USER, message.model_dump(), {"role": "tool", "tool_call_id": "c", "content": "y"}]
        running.scheduler.output = encode('{"sunny": true}')
        again = await parse(model="tiny", messages=turns, tools=[tool], response_format=Weather)
        assert again.choices[0].message.parsed == Weather(sunny=True)
