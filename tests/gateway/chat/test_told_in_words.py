"""Models whose templates teach no form of calls that is known: tools work all the same."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from default_model import folder as default_model
from gateway.tokens.tokenizer import Tokenizer
from pagewire.v1 import inference_pb2 as pb
from pagewire.v1.inference_pb2_grpc import InferenceServiceStub
from tests.gateway.http_calls import post

pytestmark = pytest.mark.asyncio(loop_scope="module")

OWN = "{{ tools | tojson }}<|action_start|>{% for m in messages %}<{{ m.role }}>{{ m.content }}\n"
OWN += "{% endfor %}{% if 'system' %}{% endif %}"
ARGUMENTS = '{"city": "Paris"}'
LISTED = f'[{{"name": "get_weather", "parameters": {ARGUMENTS}}}]'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
USER = {"role": "user", "content": "Hi"}


@pytest.fixture(scope="session", params=["default model", "own form"])
def template(request: pytest.FixtureRequest) -> str | None:
    """A template of the default model, which knows no tools, or one with an unknown form."""
    if request.param == "own form":
        return OWN
    read = Tokenizer.from_folder(default_model.ensure()).template
    assert read is not None and not read.takes_tools
    return read.source


@pytest.fixture(scope="session")
def tokenizer(model_folder: Path, tmp_path_factory: Any, template: str) -> Tokenizer:
    file = tmp_path_factory.mktemp("template") / "chat.jinja"
    file.write_text(template)
    return Tokenizer.from_folder(model_folder, file)


def chat(**choice: Any) -> tuple[str, dict[str, Any]]:
    function = {"name": "get_weather", "parameters": {"type": "object"}}
    tools = [{"type": "function", "function": function}]
    return "/v1/chat/completions", {"messages": [USER], "tools": tools} | choice


def response(**choice: Any) -> tuple[str, dict[str, Any]]:
    tools = [{"type": "function", "name": "get_weather", "parameters": {"type": "object"}}]
    return "/v1/responses", {"input": "Hi", "tools": tools} | choice


def message(**choice: Any) -> tuple[str, dict[str, Any]]:
    tools = [{"name": "get_weather", "input_schema": {"type": "object"}}]
    asked = {"messages": [USER], "max_tokens": 99, "tools": tools}
    return "/v1/messages", asked | choice


FUNCTION = {"type": "function", "function": {"name": "get_weather"}}
NAMED = {"type": "function", "name": "get_weather"}
ALLOWED = {"mode": "required", "tools": [NAMED]}
FORCED = [
    (chat(tool_choice="auto"), CALL),
    (chat(tool_choice="required"), LISTED),
    (chat(tool_choice=FUNCTION), ARGUMENTS),
    (
        chat(
            tool_choice={
                "type": "allowed_tools",
                "allowed_tools": {"mode": "required", "tools": [FUNCTION]},
            }
        ),
        LISTED,
    ),
    (response(tool_choice="auto"), CALL),
    (response(tool_choice="required"), LISTED),
    (response(tool_choice=NAMED), ARGUMENTS),
    (response(tool_choice={"type": "allowed_tools"} | ALLOWED), LISTED),
    (message(tool_choice={"type": "auto"}), CALL),
    (message(tool_choice={"type": "any"}), LISTED),
    (message(tool_choice={"type": "tool", "name": "get_weather"}), ARGUMENTS),
]


def calls_in(answer: Any) -> list[tuple[str, Any]]:
    """Names and arguments of an answer's calls, of any of the three APIs."""
    if "choices" in answer:
        made = answer["choices"][0]["message"]["tool_calls"]
        return [(one["function"]["name"], json.loads(one["function"]["arguments"])) for one in made]
    if "output" in answer:
        made = [item for item in answer["output"] if item["type"] == "function_call"]
        return [(one["name"], json.loads(one["arguments"])) for one in made]
    made = [block for block in answer["content"] if block["type"] == "tool_use"]
    return [(one["name"], one["input"]) for one in made]


@pytest.mark.parametrize(("asked", "output"), FORCED, ids=range(len(FORCED)))
async def test_a_call_comes_by_every_api_and_choice(
    asked: tuple[str, dict[str, Any]],
    output: str,
    running: Any,
    encode: Callable[[str], list[int]],
) -> None:
    running.scheduler.output = encode(output)
    answer = await post(running, *asked)
    assert calls_in(answer) == [("get_weather", {"city": "Paris"})]
    prompt = running.scheduler.prompt_of(-1)
    told = running.gateway._pipeline._tokenizer.decode(prompt, skip_special_tokens=False)
    assert '{"name": "get_weather", "parameters": {"type": "object"}}\n</tools>' in told
    assert "[{" not in told
    assert bool(running.scheduler.submits[-1].sampling.grammar) == (output != CALL)


@pytest.mark.parametrize("name", [None, "get_weather"])
async def test_a_call_comes_over_grpc(
    name: str | None, running: Any, encode: Callable[[str], list[int]]
) -> None:
    running.scheduler.output = encode(LISTED if name is None else ARGUMENTS)
    tools = [pb.Tool(name="get_weather", parameters_json='{"type": "object"}')]
    options = pb.ChatOptions(tools=tools, tool_mode=pb.TOOL_MODE_REQUIRED, required_tool=name)
    turns = [pb.ChatMessage(role="user", content="Hi")]
    answer = await InferenceServiceStub(running.channel).Chat(
        pb.ChatRequest(messages=turns, chat=options)
    )
    (call,) = answer.output.tool_calls
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Paris"})
