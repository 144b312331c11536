"""Tools of /v1/responses that are no plain functions: free text, and namespaces."""

import json
import random
from collections.abc import Callable
from typing import Any

import openai
import pytest
import pytest_asyncio

from gateway.chat import formats
from gateway.chat.answer import ChatFormat
from gateway.chat.conversation import Conversation, Message
from gateway.http.response_items import Items
from gateway.http.response_tools.bodies import TextTool, called_tools, to_tools
from gateway.http.response_tools.input_text import InputText, to_arguments
from tests.gateway.chat.call_texts import (
    deepseek_v3,
    deepseek_v31,
    dsml,
    gemma4,
    glm,
    kimi,
    lfm2,
    minimax,
    quoted,
    qwen,
    seed,
)
from tests.gateway.chat.test_call_families import CALLED, HOSTILE
from tests.gateway.http_calls import accepts, post, refusal

pytestmark = pytest.mark.asyncio(loop_scope="module")

ROUTE = "/v1/responses"
RANDOM = random.Random(7)
PATCH = '*** Begin Patch\n+print("ö 😀")\t\\n\n*** End Patch'
RUN: dict[str, Any] = {"type": "custom", "name": "run", "description": "Runs code."}
SEARCH = {"type": "function", "name": "search", "parameters": {"type": "object"}}
BAD = SEARCH | {
    "strict": True,
    "parameters": {"type": "object", "properties": {"a": {"type": "string", "pattern": "("}}},
}
CRM: dict[str, Any] = {
    "type": "namespace",
    "name": "crm",
    "description": "Customers.",
    "tools": [SEARCH, RUN],
}


def called(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@pytest_asyncio.fixture(loop_scope="module")
async def client(running: Any) -> Any:
    base_url = f"{running.http_url}/v1"
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        yield client


Encode = Callable[[str], list[int]]


async def streamed(client: Any, **fields: Any) -> tuple[list[Any], Any]:
    """The events of a stream, and the response that they end with."""
    stream = await client.responses.create(model="tiny", input="Hello", stream=True, **fields)
    events = [event async for event in stream]
    return events, events[-1].response


async def test_a_custom_tools_call_has_its_input_as_text(
    client: Any, running: Any, encode: Encode
) -> None:
    running.scheduler.output = encode("Wait. " + called("run", to_arguments(PATCH)))
    whole = await client.responses.create(model="tiny", input="Hello", tools=[RUN])
    message, call = whole.output
    assert (message.type, call.type) == ("message", "custom_tool_call")
    assert (call.name, call.input) == ("run", PATCH)
    events, last = await streamed(client, tools=[RUN])
    assert last.output[-1].input == PATCH
    deltas = [event for event in events if event.type == "response.custom_tool_call_input.delta"]
    assert len(deltas) > 3 and "".join(event.delta for event in deltas) == PATCH
    (done,) = [event for event in events if event.type == "response.custom_tool_call_input.done"]
    added = [event.item for event in events if event.type == "response.output_item.added"]
    assert (done.input, done.item_id, added[-1].input) == (PATCH, last.output[-1].id, "")
    assert not any("function_call" in event.type for event in events)


HARMONY_CALL = CALLED.replace("functions.f", "functions.run")
FAMILIES = {
    "hermes": called("run", to_arguments(HOSTILE)),
    "llama3_json": f'{{"name": "run", "parameters": {to_arguments(HOSTILE)}}}',
    "mistral": f'[TOOL_CALLS][{{"name": "run", "arguments": {to_arguments(HOSTILE)}}}]',
    "qwen3_coder": qwen("run", input=HOSTILE),
    "glm": glm("run", input=HOSTILE),
    "minimax_m2": minimax(("run", {"input": HOSTILE})),
    "seed_oss": seed("run", input=HOSTILE),
    "deepseek_v3": deepseek_v3(("run", to_arguments(HOSTILE))),
    "deepseek_v31": deepseek_v31(("run", to_arguments(HOSTILE))),
    "deepseek_v32": dsml("function_calls", ("run", {"input": ("true", HOSTILE)})),
    "deepseek_v4": dsml("tool_calls", ("run", {"input": ("true", HOSTILE)})),
    "lfm2": lfm2(f"run(input={HOSTILE!r})"),
    "gemma4": gemma4(f"run{{input:{quoted(HOSTILE)}}}"),
    "kimi": kimi(("run", to_arguments(HOSTILE))),
    "harmony": f"{HARMONY_CALL}{to_arguments(HOSTILE)}<|call|>",
}


async def test_every_family_of_models_can_write_the_text() -> None:
    """Also those that write arguments as plain text; wherever the output is cut."""
    assert set(FAMILIES) == set(formats.FORMATS)
    body = TextTool(type="custom", name="run")
    chat = Conversation((Message("user", "Hi"),), to_tools([body]))
    for name, text in FAMILIES.items():
        reasoning = formats.REASONING["harmony"] if name == "harmony" else None
        for step in (1, 3, len(text)):
            reader = ChatFormat(True, formats.FORMATS[name], reasoning).reader(chat, "", None)
            items = Items(called_tools([body]))
            assert reader is not None
            for at in range(0, len(text), step):
                items.add(reader.push(text[at : at + step], is_last=at + step >= len(text)))
            items.close("completed")
            (item,) = items.items
            assert (item["type"], item["input"]) == ("custom_tool_call", HOSTILE), name


async def test_its_call_and_result_come_back_as_turns(running: Any, tokenizer: Any) -> None:
    call = {
        "type": "custom_tool_call",
        "id": "ctc_1",
        "call_id": "c1",
        "name": "run",
        "input": PATCH,
    }
    result = {"type": "custom_tool_call_output", "call_id": "c1", "output": "Patched."}
    await post(running, ROUTE, {"input": [call, result], "tools": [RUN]})
    prompt = tokenizer.decode(running.scheduler.prompt_of(0), skip_special_tokens=False)
    assert to_arguments(PATCH) in prompt and "Patched." in prompt
    assert '"required": ["input"]' in prompt and "Runs code." in prompt


async def test_a_call_that_was_cut_off_has_the_input_so_far(running: Any, encode: Encode) -> None:
    for end, expected in (('{"input": "abc\\u00', "abc"), ('{"input": "', ""), ("{", "{")):
        begun = f'<tool_call>\n{{"name": "run", "arguments": {end}'
        running.scheduler.output = encode(begun)
        (call,) = (await post(running, ROUTE, {"input": "a", "tools": [RUN]}))["output"]
        assert (call["type"], call["input"]) == ("custom_tool_call", expected)


async def test_the_one_tool_may_be_forced(client: Any, running: Any, encode: Encode) -> None:
    running.scheduler.output = encode(to_arguments("print(1)"))
    choice = {"type": "custom", "name": "run"}
    answer = await client.responses.create(
        model="tiny", input="Hello", tools=[RUN, SEARCH], tool_choice=choice
    )
    assert [(call.type, call.input) for call in answer.output] == [("custom_tool_call", "print(1)")]
    assert answer.tool_choice.model_dump() == choice


def with_regex(definition: str) -> dict[str, Any]:
    return RUN | {"format": {"type": "grammar", "syntax": "regex", "definition": definition}}


@pytest.mark.parametrize(
    ("tool", "fitting", "others"),
    [
        (with_regex("[0-9]+|a"), ["17", "a"], ["", "b", "1a", "aa"]),
        (with_regex(r'"\n\w+'), ['"\nab'], ["ab", '"ab', '"\n']),
        (RUN | {"format": {"type": "text"}}, ["", PATCH, "{}"], []),
    ],
)
async def test_a_call_that_is_begun_holds_to_the_format(
    tool: dict[str, Any], fitting: list[str], others: list[str], running: Any, tokenizer: Any
) -> None:
    await post(running, ROUTE, {"input": "a", "tools": [tool]})
    for text in (*fitting, *others):
        written = called("run", to_arguments(text))
        assert accepts(running, tokenizer, written) is (text in fitting), text
    assert not accepts(running, tokenizer, called("run", '{"code": "a"}'))
    assert accepts(running, tokenizer, "No call.")


@pytest.mark.parametrize(
    ("field", "tools"),
    [
        ("tools[0].format.syntax", [RUN | {"format": {"type": "grammar", "syntax": "lark"}}]),
        ("tools[0].format.definition.properties.input", [with_regex("(")]),
        ("tools[1].name", [RUN, RUN]),
        ("tools[1].type", [RUN, None]),
        ("tools[0].type", [{"type": 5, "name": "run"}]),
        ("tools[0].tools[1].name", [CRM | {"tools": [SEARCH, SEARCH]}]),
        ("tools[0].tools[0].parameters.properties.a", [CRM | {"tools": [BAD]}]),
        ("tools[0].format.type", [RUN | {"format": {"type": "xml"}}]),
        (
            "tools[0].format.definition",
            [RUN | {"format": {"type": "grammar", "syntax": "regex"}}],
        ),
        ("tools[1].name", [SEARCH, {"type": "custom"}]),
        ("tools[0].tools[1].type", [CRM | {"tools": [SEARCH, {"type": "web_search"}]}]),
        ("tools[0].tools[0].type", [CRM | {"tools": [CRM]}]),
        ("tools[0].tools", [{"type": "namespace", "name": "crm"}]),
    ],
)
async def test_what_cannot_be_is_named(field: str, tools: list[Any], running: Any) -> None:
    assert (await refusal(running, ROUTE, {"input": "a", "tools": tools}))[:2] == (400, field)


async def test_a_namespaces_functions_are_called_by_both_names(
    client: Any, running: Any, tokenizer: Any, encode: Encode
) -> None:
    calls = called("crm.search", '{"q": 1}') + "\n" + called("crm.run", to_arguments("a"))
    running.scheduler.output = encode(calls)
    answer = await client.responses.create(model="tiny", input="Hello", tools=[CRM])
    search, run = answer.output
    assert (search.type, search.name, search.namespace) == ("function_call", "search", "crm")
    assert (run.type, run.name, run.namespace, run.input) == ("custom_tool_call", "run", "crm", "a")
    items = [item.model_dump(exclude_none=True) for item in answer.output]
    results = [
        {"type": "function_call_output", "call_id": search.call_id, "output": "none"},
        {"type": "custom_tool_call_output", "call_id": run.call_id, "output": "b"},
    ]
    await client.responses.create(model="tiny", input=[*items, *results], tools=[CRM, SEARCH])
    prompt = tokenizer.decode(running.scheduler.prompt_of(-1), skip_special_tokens=False)
    assert '"crm.search"' in prompt and '"crm.run"' in prompt


async def test_the_input_is_the_same_however_its_json_is_cut() -> None:
    texts = [
        "",
        PATCH,
        "\\",
        '"',
        "\ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16"),
    ]
    texts += ["".join(RANDOM.choices('a"\\\n\té😀\x00/{}', k=12)) for _ in range(60)]
    for text in texts:
        for written in (
            to_arguments(text),
            json.dumps({"input": text}),
            f' {{ "input" :"{"a" * 3}"}}',
        ):
            expected = json.loads(written)["input"]
            for _ in range(4):
                reader, found, at = InputText(), "", 0
                while at < len(written):
                    step = RANDOM.randint(1, 5)
                    found += reader.push(written[at : at + step])
                    at += step
                assert found + reader.end() == expected


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (r"a\ud83db\u00e9\ude00", "a\ufffdbé\ufffd"),
        (r"\ud83d\ud83d\ude00", "\ufffd😀"),
        (r"\ud83d\n\uDE00", "\ufffd\n\ufffd"),
        (r"\ud83d", "\ufffd"),
    ],
)
async def test_half_a_character_is_no_character(written: str, expected: str) -> None:
    """Text must be Unicode, and JSON may hold halves."""
    arguments = f'{{"input": "{written}"}}'
    assert InputText().push(arguments) == expected
    by_one = InputText()
    assert "".join(map(by_one.push, arguments)) == expected
