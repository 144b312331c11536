"""Requests that clients were seen to send: each row is one sentence, one request, its answer."""

import json
from dataclasses import dataclass
from typing import Any

import pytest

from tests.gateway.http_calls import post, refusal

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT, COMPLETION, RESPONSE = "/v1/chat/completions", "/v1/completions", "/v1/responses"
USER = {"role": "user", "content": "Weather?"}
CALLED = {"name": "get_weather", "arguments": '{"city": "Paris"}'}
CALL = {"id": "c1", "type": "function", "function": CALLED}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
CLOSED = SCHEMA | {
    "additionalProperties": False,
    "$schema": "http://json-schema.org/draft-07/schema#",
}
ZOD_TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": CLOSED, "strict": True},
}
ZOD_FORM = {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": CLOSED}}
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}


@dataclass(frozen=True, slots=True)
class Row:
    """A request that is accepted, and the text that the template must have written."""

    sentence: str
    route: str
    body: dict[str, Any]
    shown: str = ""


def turn(sentence: str, message: dict[str, Any], shown: str = "") -> Row:
    return Row(sentence, CHAT, {"messages": [USER, message, USER]}, shown)


def chat(sentence: str, **fields: Any) -> Row:
    return Row(sentence, CHAT, {"messages": [USER]} | fields)


def completion(sentence: str, **fields: Any) -> Row:
    return Row(sentence, COMPLETION, {"prompt": "Hello"} | fields)


def response(sentence: str, **fields: Any) -> Row:
    return Row(sentence, RESPONSE, {"input": "Hello"} | fields)


def item(sentence: str, *items: dict[str, Any], shown: str = "") -> Row:
    return Row(sentence, RESPONSE, {"input": [USER, *items, USER]}, shown)


def assistant(**fields: Any) -> dict[str, Any]:
    return {"role": "assistant"} | fields


def parts(*entries: Any) -> dict[str, Any]:
    return assistant(content=list(entries))


def call(**fields: Any) -> dict[str, Any]:
    return assistant(content=None, tool_calls=[CALL | fields])


CONTROL = {"type": "ephemeral"}
TURNS = [
    turn("an assistant without content and calls is empty text", assistant(content=None)),
    turn("an assistant's content may be left out", assistant()),
    turn("a refusal is the content of a turn without another", assistant(refusal="No."), "No."),
    turn("a part may be a refusal", parts({"type": "refusal", "refusal": "No."}), "No."),
    turn("a part may be input_text", parts({"type": "input_text", "text": "In."}), "In."),
    turn("a part may be output_text", parts({"type": "output_text", "text": "Out."}), "Out."),
    turn(
        "a part may be thinking, and is reasoning",
        parts(
            {"type": "thinking", "thinking": "Hm.", "signature": "s"}, {"type": "text", "text": "a"}
        ),
        "<think>\nHm.\n</think>\n\na",
    ),
    turn("content may be a list of plain strings", parts("One", "Two"), "One\nTwo"),
    turn("calls of an earlier turn have an index", call(index=0)),
    turn("a turn has reasoning_details", assistant(content="a", reasoning_details=[{"x": 1}])),
    turn("a turn has provider_specific_fields", call(provider_specific_fields={"a": 1})),
    turn(
        "a turn has an id, annotations and no audio",
        assistant(content="a", id="m1", annotations=[], audio=None),
    ),
    turn("a turn has parsed content", assistant(content="{}", parsed={"a": 1})),
    turn(
        "a called function has parsed_arguments",
        call(function=CALLED | {"parsed_arguments": {"a": 1}}),
    ),
    turn("cache_control stands in a turn", assistant(content="a", cache_control=CONTROL)),
    turn(
        "cache_control stands in a part",
        parts({"type": "text", "text": "a", "cache_control": CONTROL}),
    ),
    turn(
        "arguments that are no JSON are text",
        call(function=CALLED | {"arguments": '{"city": "Par'}),
        '{\\"city\\": \\"Par',
    ),
    turn(
        "arguments may be the object itself",
        call(function=CALLED | {"arguments": {"city": "Paris"}}),
        '{"city": "Paris"}',
    ),
    turn("arguments that are a list are text", call(function=CALLED | {"arguments": "[1]"}), "[1]"),
    turn("reasoning comes back as reasoning", assistant(content="a", reasoning="Hm."), "Hm."),
    turn(
        "reasoning comes back as reasoning_content",
        assistant(content="a", reasoning_content="Hm."),
        "Hm.",
    ),
    turn(
        "null stands everywhere",
        assistant(content="a", name=None, tool_calls=None, function_call=None, refusal=None),
    ),
    turn("a tool's result may be null", {"role": "tool", "tool_call_id": "c1", "content": None}),
]
CHATS = [
    chat("cache_control stands in a tool", tools=[WEATHER | {"cache_control": CONTROL}]),
    chat("cache_control stands at the top", cache_control=CONTROL),
    chat("a strict tool as zodFunction writes it", tools=[ZOD_TOOL]),
    chat("a strict tool and a form", tools=[ZOD_TOOL], response_format=ZOD_FORM),
    chat("n equal answers at temperature 0", n=2, temperature=0),
    chat("max_completion_tokens wins over max_tokens", max_tokens=3, max_completion_tokens=4),
    chat("stream_options without a stream", stream_options={"include_usage": True}),
    chat("top_logprobs 0 without logprobs", top_logprobs=0),
    chat("tool_choice auto without tools", tool_choice="auto", tools=[]),
    chat("tool_choice none without tools", tool_choice="none"),
    chat(
        "a json_object with llama.cpp's schema",
        response_format={"type": "json_object", "schema": SCHEMA},
    ),
    chat(
        "a json_schema without a name",
        response_format={"type": "json_schema", "json_schema": {"schema": SCHEMA}},
    ),
    chat("seed -1 is random", seed=-1),
    chat("max_tokens -1 is up to the limit", max_tokens=-1),
    chat("max_tokens null is up to the limit", max_tokens=None),
    chat("a template variable that the template has not", chat_template_kwargs={"mood": 1}),
    chat(
        "continuous_usage_stats",
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
    ),
    chat("include_obfuscation", stream=True, stream_options={"include_obfuscation": True}),
    chat("include_obfuscation false", stream=True, stream_options={"include_obfuscation": False}),
    chat("prompt_logprobs in a stream", stream=True, prompt_logprobs=1),
    chat("echo in a chat", echo=True),
    chat("return_token_ids", return_token_ids=True),
    chat("return_tokens_as_token_ids", return_tokens_as_token_ids=True),
    chat("truncate_prompt_tokens", truncate_prompt_tokens=5),
    chat("bad_words", bad_words=["world"]),
    chat("guidance's guided_decoding_backend", guided_decoding_backend="guidance"),
    chat("a user of any length", user="u" * 4000),
    chat("service_tier flex", service_tier="flex"),
    chat("a prediction", prediction={"type": "content", "content": "Hello"}),
    chat(
        "allowed tools",
        tools=[WEATHER],
        tool_choice={
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto", "tools": [WEATHER]},
        },
    ),
    chat("the model may be left out"),
]
OTHERS = [
    completion("logprobs false in completions", logprobs=False),
    completion("logprobs true in completions", logprobs=True, max_tokens=0, echo=True),
    completion("logprob_token_ids of nothing", logprob_token_ids=[], logprobs=None),
    completion("echo in a stream", stream=True, echo=True),
    completion("prompt_logprobs in a stream of completions", stream=True, prompt_logprobs=1),
    completion("max_tokens null in completions", max_tokens=None),
    completion("a list of 1,024 prompts", prompt=["Hello"] * 1024, max_tokens=1),
    completion("best_of 1 and use_beam_search false", best_of=1, use_beam_search=False),
    response("tool_choice auto without tools in responses", tool_choice="auto", tools=[]),
    response("a reasoning summary", reasoning={"summary": "auto", "effort": None}),
    response("a reasoning summary of null", reasoning={"summary": None}),
    response("include of encrypted reasoning", include=["reasoning.encrypted_content"]),
    response("text.verbosity", text={"verbosity": "medium"}),
    response("top_k, stop and seed in responses", top_k=5, stop=["x"], seed=1),
    response("Codex' client_metadata", client_metadata={"a": "b"}),
    response("store false", store=False),
    response("a custom tool", tools=[{"type": "custom", "name": "run"}]),
    response(
        "Codex' namespace of functions",
        tools=[
            {
                "type": "namespace",
                "name": "mcp",
                "description": "Tools.",
                "tools": [{"type": "function", "name": "look", "defer_loading": None}],
            }
        ],
    ),
    item(
        "an answer that was cut off while it reasoned comes back",
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "status": "incomplete",
            "content": [{"type": "reasoning_text", "text": "Hm."}],
        },
        shown="Hm.",
    ),
    item(
        "reasoning with a summary",
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [{"type": "summary_text", "text": "x"}],
            "encrypted_content": None,
        },
    ),
    item(
        "parsed content comes back in responses",
        {
            "type": "message",
            "role": "assistant",
            "id": "m",
            "status": "completed",
            "content": [
                {"type": "output_text", "text": "Out.", "annotations": [], "parsed": {"a": 1}}
            ],
        },
        shown="Out.",
    ),
    item(
        "a strict call comes back with parsed_arguments",
        {
            "type": "function_call",
            "id": "f",
            "call_id": "c",
            "name": "get_weather",
            "arguments": "{}",
            "parsed_arguments": {},
        },
        {"type": "function_call_output", "call_id": "c", "output": "sunny"},
        shown="sunny",
    ),
]


@pytest.mark.parametrize("row", [*TURNS, *CHATS, *OTHERS], ids=lambda row: row.sentence)
async def test_what_a_client_sends_is_accepted(row: Row, running: Any, tokenizer: Any) -> None:
    structured = row.body.get("response_format")
    if structured is not None:
        running.scheduler.output = tokenizer._tokenizer.encode('{"a": 1}').ids
    answered = await running.http.post(row.route, json=row.body)
    assert answered.status_code == 200, answered.text
    prompt = tokenizer.decode(running.scheduler.prompt_of(0), skip_special_tokens=False)
    assert row.shown in prompt
    assert "None" not in prompt, "a template gets a text for null"


async def test_every_row_is_a_sentence_of_its_own() -> None:
    sentences = [row.sentence for row in (*TURNS, *CHATS, *OTHERS)]
    assert len(set(sentences)) == len(sentences)


async def sampled(running: Any, route: str, **fields: Any) -> Any:
    """The sampling parameters that the scheduler got."""
    base = {"messages": [USER]} if route == CHAT else {"prompt": "Hello"}
    await post(running, route, base | fields)
    return running.scheduler.submits[-1].sampling


async def test_the_values_that_are_accepted_mean_what_they_say(running: Any) -> None:
    both = {"max_tokens": 3, "max_completion_tokens": 4}
    assert (await sampled(running, CHAT, **both)).max_tokens == 4
    assert not (await sampled(running, CHAT, seed=-1)).HasField("seed")
    for fields in ({"max_tokens": -1}, {"max_tokens": None}):
        assert (await sampled(running, COMPLETION, **fields)).max_tokens == 2**32 - 1
    assert (await sampled(running, CHAT, max_tokens=-1)).max_tokens == 2**32 - 1
    assert not (await sampled(running, COMPLETION, logprobs=False)).HasField("logprobs")
    assert (await sampled(running, COMPLETION)).max_tokens == 16
    prompt_alone = {"echo": True, "max_tokens": 0}
    assert (await sampled(running, COMPLETION, logprobs=True, **prompt_alone)).logprobs == 1


async def test_n_answers_at_temperature_0_are_equal(running: Any) -> None:
    body = {"messages": [USER], "n": 3, "temperature": 0}
    choices = (await post(running, CHAT, body))["choices"]
    assert len({choice["message"]["content"] for choice in choices}) == 1 and len(choices) == 3


async def test_allowed_tools_hide_the_others(running: Any) -> None:
    other = {"type": "function", "function": {"name": "other"}}
    allowed = {"mode": "auto", "tools": [other]}
    for choice in ({"allowed_tools": allowed}, allowed):
        choice = {"type": "allowed_tools"} | choice
        body = {"messages": [USER], "tools": [WEATHER, other]}
        await post(running, CHAT, body | {"tool_choice": choice})
        only = {"messages": [USER], "tools": [other]}
        await post(running, CHAT, only)
        first, second = running.scheduler.submits[-2:]
        assert first.prompt_token_ids == second.prompt_token_ids


async def test_a_long_user_is_a_tenant_of_its_own(running: Any) -> None:
    for user in ("u" * 4000, "u" * 4001, "short"):
        await post(running, CHAT, {"messages": [USER], "user": user})
    long, longer, short = (submit.tenant for submit in running.scheduler.submits)
    assert len({long, longer, short}) == 3 and short == "short" and len(long) == 64


ABSENT = (
    "/v1/chat/completions/batch", "/v1/images/generations",
    "/v1/audio/speech", "/v1/audio/transcriptions", "/api/chat", "/api/generate",
)  # fmt: skip
REFUSED: list[tuple[str, str, dict[str, Any]]] = [
    ("structured_outputs.grammar", "nope", {"structured_outputs": {"grammar": "root ::= nope"}}),
    ("response_format.json_schema", "is missing", {"response_format": {"type": "json_schema"}}),
    ("tool_choice", "only allowed with tools", {"tool_choice": "required"}),
    ("thinking_token_budget", "one token", {"thinking_token_budget": 5}),
    ("messages[0].audio", "not supported", {"messages": [USER | {"audio": {"id": "a"}}]}),
    (
        "messages",
        "prompt is too long: 10016 tokens, but this model's maximum context length is 4096 tokens",
        {"messages": [USER | {"content": "é " * 9999}]},
    ),
]


@pytest.mark.parametrize(("field", "words", "fields"), REFUSED, ids=lambda value: str(value)[:40])
async def test_what_stays_refused_is_named(
    field: str, words: str, fields: dict[str, Any], running: Any
) -> None:
    status, param, message = await refusal(running, CHAT, {"messages": [USER]} | fields)
    assert (status, param) == (400, field)
    assert words in message


async def test_responses_give_no_log_probabilities(running: Any) -> None:
    body = {"input": "x", "include": ["message.output_text.logprobs"]}
    assert (await refusal(running, RESPONSE, body))[:2] == (400, "include")


async def test_what_other_servers_tell_is_told(running: Any) -> None:
    gets = ("/ping", "/version", "/load", "/server_info", "/tokenizer_info", "/metrics")
    for method, route in (("POST", "/ping"), *(("GET", route) for route in gets)):
        assert (await running.http.request(method, route)).status_code == 200, route
    info = (await running.http.get("/server_info")).json()
    assert (info["model"], info["max_model_len"]) == ("tiny", 4096)
    assert info["chat_format"]["tool_call_parser"] == "hermes"
    told = (await running.http.get("/tokenizer_info")).json()
    assert "<tool_call>" in told["chat_template"]
    assert str(running.gateway._config.model) not in json.dumps([info, told])


@pytest.mark.parametrize("route", ABSENT)
async def test_what_is_no_route_is_said_to_be_none(route: str, running: Any) -> None:
    answered = await running.http.post(route, json={"model": "tiny"})
    assert answered.status_code == 404
    assert route in answered.json()["error"]["message"]
