"""A call within reasoning that was never closed ends it; a text that speaks of one does not."""

import json
import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest

from gateway.chat.answer import ChatFormat
from gateway.chat.conversation import Conversation, Message, Tool
from gateway.chat.formats import (
    ALL_FORMATS,
    DEEPSEEK_V3,
    DEEPSEEK_V4,
    DEEPSEEK_V31,
    DEEPSEEK_V32,
    GEMMA4,
    GLM,
    HARMONY,
    HERMES,
    KIMI,
    LFM2,
    LLAMA3_JSON,
    MINIMAX_M2,
    MISTRAL,
    QWEN3_CODER,
    REASONING,
    SEED_OSS,
)
from gateway.chat.parts import CallStart, Part, reply_of
from gateway.chat.tool_format import ToolCallFormat
from gateway.structure.thinking import ThoughtFirst
from tests.gateway.chat.call_texts import (
    deepseek_v3,
    deepseek_v31,
    dsml,
    gemma4,
    glm,
    kimi,
    lfm2,
    minimax,
    qwen,
    seed,
)
from tests.gateway.chat.test_call_families import merged
from tests.gateway.http_calls import post

TOOLS = (Tool("f", None, {"type": "object", "properties": {"a": {"type": "integer"}}}), Tool("g"))
CHAT = Conversation((Message("user", "Hi"),), TOOLS)
JSON_CALL = '{"name": "f", "arguments": {"a": 1}}'
CALLED = [
    (HERMES, f"<tool_call>\n{JSON_CALL}\n</tool_call>"),
    (HERMES, '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>'),
    (HERMES, f"<tool_call>[{JSON_CALL}]</tool_call>"),
    (LLAMA3_JSON, f"<|python_tag|>{JSON_CALL}"),
    (MISTRAL, f"[TOOL_CALLS][{JSON_CALL}]"),
    (MISTRAL, '[TOOL_CALLS]f[ARGS]{"a": 1}'),
    (QWEN3_CODER, qwen("f", a="1")),
    (QWEN3_CODER, qwen("f", a="1").removeprefix("<tool_call>\n")),
    (GLM, glm("f", a="1")),
    (KIMI, kimi(("f", '{"a": 1}'))),
    (DEEPSEEK_V3, deepseek_v3(("f", '{"a": 1}'))),
    (DEEPSEEK_V31, deepseek_v31(("f", '{"a": 1}'))),
    (DEEPSEEK_V32, dsml("function_calls", ("f", {"a": ("false", "1")}))),
    (DEEPSEEK_V4, dsml("tool_calls", ("f", {"a": ("false", "1")}))),
    (MINIMAX_M2, minimax(("f", {"a": "1"}))),
    (SEED_OSS, seed("f", a="1")),
    (LFM2, lfm2("f(a=1)")),
    (LFM2, f"<|tool_call_start|>[{JSON_CALL}]<|tool_call_end|>"),
    (GEMMA4, gemma4("f{a:1}")),
]
MENTIONED = [
    (HERMES, "I may use <tool_call> for f, as {"),
    (HERMES, '<tool_call>{"name": "other", "arguments": {}}</tool_call>'),
    (HERMES, "<tool_call> {not JSON}"),
    (LLAMA3_JSON, JSON_CALL),
    (LLAMA3_JSON, "a <|python_tag|> f()"),
    (MISTRAL, "[TOOL_CALLS] f and [TOOL_CALLS][1]"),
    (QWEN3_CODER, "A <function=f> is what I write. <function=other></function>"),
    (GLM, "<tool_call>f is a call, <tool_call>other<arg_key>a"),
    (KIMI, "<|tool_calls_section_begin|> f"),
    (DEEPSEEK_V31, deepseek_v31(("other", "{}"))),
    (MINIMAX_M2, '<minimax:tool_call> and <invoke name="f">, and no more'),
    (LFM2, "<|tool_call_start|>f(a=1) and <|tool_call_start|>[other(a=1)]"),
    (GEMMA4, "<|tool_call> call:other{}"),
]


def read(
    form: ToolCallFormat, pieces: Iterable[str], prompt: str = "<think>", structure: Any = None
) -> tuple[list[Part], int]:
    answer = ChatFormat(True, form, REASONING["qwen3"]).reader(CHAT, prompt, structure)
    assert answer is not None and answer.thought is not None
    parts: list[Part] = []
    for piece in pieces:
        parts += answer.push(piece, is_last=False)
        answer.thought.add(piece, len(piece))
    parts += answer.push("", is_last=True)
    answer.thought.add("", 0)
    plain = [replace(one, id="call_") if isinstance(one, CallStart) else one for one in parts]
    return merged(plain), answer.thought.count


@pytest.mark.parametrize(("form", "call"), CALLED, ids=range(len(CALLED)))
@pytest.mark.parametrize("opening", ["", "<think>\n"])
def test_a_call_ends_the_reasoning_wherever_the_text_is_cut(
    opening: str, form: ToolCallFormat, call: str
) -> None:
    prompt = "" if opening else "<think>\n"
    text = f"{opening}I use <b>f</b>:\n\n{call}"
    whole, num_tokens = read(form, [text], prompt)
    reply = reply_of(whole)
    assert (reply.reasoning, reply.content) == ("I use <b>f</b>:", "")
    assert [(made.name, json.loads(made.arguments)) for made in reply.tool_calls] == [
        ("f", {"a": 1})
    ]
    assert num_tokens == len(text) - len(call)
    for cut in range(len(text) + 1):
        assert read(form, [text[:cut], text[cut:]], prompt) == (whole, num_tokens), cut
    assert read(form, text, prompt) == (whole, num_tokens)


@pytest.mark.parametrize(("form", "text"), MENTIONED, ids=range(len(MENTIONED)))
def test_a_mention_does_not(form: ToolCallFormat, text: str) -> None:
    for end, content in (("", ""), ("\n</think>\n\nHello", "Hello")):
        whole, _ = read(form, [text + end])
        reply = reply_of(whole)
        assert (reply.reasoning, reply.content, reply.tool_calls) == (text, content, ())
        for cut in range(len(text + end) + 1):
            assert read(form, [(text + end)[:cut], (text + end)[cut:]])[0] == whole, cut


@pytest.mark.parametrize(("form", "call"), CALLED, ids=range(len(CALLED)))
def test_the_marker_that_closes_nothing_any_more_is_dropped(
    form: ToolCallFormat, call: str
) -> None:
    text = f"Hm. {call}\n</think>\n\nDone </think>."
    whole, _ = read(form, [text])
    reply = reply_of(whole)
    assert (reply.reasoning, len(reply.tool_calls)) == ("Hm.", 1)
    assert reply.content == "Done </think>."
    for cut in range(len(text) + 1):
        assert read(form, [text[:cut], text[cut:]])[0] == whole, cut


def test_a_call_in_thoughts_that_a_grammar_bounds_is_a_part_of_them() -> None:
    chat = Conversation(CHAT.messages, TOOLS, max_reasoning_tokens=99)
    chat_format = ChatFormat(True, HERMES, REASONING["qwen3"], {"<think>": 1, "</think>": 2})
    structure = chat_format.with_thought(chat, "<think>", None)
    assert isinstance(structure, ThoughtFirst)
    text = f"Hm. <tool_call>{JSON_CALL}</tool_call> no.</think>Hello"
    reply = reply_of(read(HERMES, [text], structure=structure)[0])
    assert reply.reasoning == f"Hm. <tool_call>{JSON_CALL}</tool_call> no."
    assert (reply.content, reply.tool_calls) == ("Hello", ())


WORDS = ["<tool_call>", "</tool_call>", "<function=f>", "<function=g>", "</function>", "</think>"]
WORDS += ["<parameter=a>", "</parameter>", "<arg_key>a</arg_key>", "<arg_value>", "</arg_value>"]
WORDS += [JSON_CALL, "[TOOL_CALLS]", "<|python_tag|>", "<think>", "[", "]", ",", "f\n", "{", '"']
WORDS += [
    lfm2("f(a=1)"),
    gemma4("f{a:1}"),
    "<|tool_call_start|>",
    "[f(",
    "a=1",
    ")",
    "<|tool_call>",
]
WORDS += [*deepseek_v31(("f", "{")).partition("{"), '<invoke name="f">', "<minimax:tool_call>"]
WORDS += [*kimi(("f", "{")).partition("{"), "\\", "\n", " ", "x"]


def test_no_thought_or_call_is_read_otherwise_when_it_is_cut() -> None:
    dice = random.Random(0)
    forms = [form for form in ALL_FORMATS if form is not HARMONY]
    for _ in range(100):
        form, prompt = dice.choice(forms), dice.choice(["", "<think>"])
        text = "".join(dice.choices(WORDS, k=dice.randrange(1, 14)))
        whole, _ = read(form, [text], prompt)
        cut = dice.randrange(len(text) + 1)
        assert read(form, [text[:cut], text[cut:]], prompt)[0] == whole, (form.name, text, cut)
        assert read(form, text, prompt)[0] == whole, (form.name, text)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("stop", [None, ["\n\n"]])
async def test_a_call_in_thoughts_comes_by_every_api(
    stop: list[str] | None, running: Any, encode: Callable[[str], list[int]]
) -> None:
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    running.scheduler.output = encode(f"<think>\nA tool.\n\nOr <tool_call> not.\n\n{call}")
    user, parameters = {"role": "user", "content": "Hi"}, {"type": "object"}
    function = {"name": "get_weather", "parameters": parameters}
    body = {"messages": [user], "tools": [{"type": "function", "function": function}], "stop": stop}
    choice = (await post(running, "/v1/chat/completions", body))["choices"][0]
    (made,) = choice["message"]["tool_calls"]
    assert made["function"] == {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    assert choice["message"]["reasoning_content"] == "A tool.\n\nOr <tool_call> not."
    assert choice["finish_reason"] == "tool_calls"
    answer = await post(
        running,
        "/v1/messages",
        {
            "messages": [user],
            "max_tokens": 99,
            "tools": [{"name": "get_weather", "input_schema": parameters}],
            "stop_sequences": stop or [],
        },
    )
    assert answer["stop_reason"] == "tool_use"
    assert answer["content"][-1]["input"] == {"city": "Paris"}
    tools = [{"type": "function"} | function]
    items = (await post(running, "/v1/responses", {"input": "Hi", "tools": tools}))["output"]
    assert [item["type"] for item in items] == ["reasoning", "function_call"]
