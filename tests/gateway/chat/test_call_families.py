"""Calls of families that write no plain JSON, split at every place."""

import itertools
import json
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.chat.answer import AnswerReader, ChatFormat, choose
from gateway.chat.conversation import Conversation, Message, Tool
from gateway.chat.families import harmony
from gateway.chat.formats import (
    DEEPSEEK_V3,
    DEEPSEEK_V4,
    DEEPSEEK_V31,
    DEEPSEEK_V32,
    FORMATS,
    GEMMA4,
    GLM,
    HARMONY,
    KIMI,
    LFM2,
    MINIMAX_M2,
    QWEN3_CODER,
    REASONING,
    SEED_OSS,
)
from gateway.chat.parts import CallArguments, CallStart, Content, Part, Reasoning, reply_of
from gateway.chat.template import ChatTemplate
from gateway.chat.tool_format import ToolCallFormat
from tests.gateway.chat.call_texts import (
    DSML,
    deepseek_v3,
    deepseek_v31,
    gemma4,
    glm,
    kimi,
    lfm2,
    minimax,
    qwen,
    seed,
    token,
)
from tests.gateway.chat.newer_calls import NEWER_CALLS, NEWER_TEXTS

SCHEMA: Any = {
    "type": "object",
    "$defs": {"e": {"enum": ["x", "y"]}},
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "tags": {"type": "array"},
        "hot": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
        "note": {"type": ["string", "null"]},
        "kind": {"$ref": "#/$defs/e"},
        "any": {},
    },
}
CHAT = Conversation((Message("user", "Hi"),), (Tool("f", None, SCHEMA), Tool("g")))


HOSTILE = 'a "b" \\ </paramete </arg_valu\n\n é😀 <tool_call>'
G: Any = ("g", {})
FAMILIES = [QWEN3_CODER, GLM, KIMI, HARMONY, MINIMAX_M2, SEED_OSS, DEEPSEEK_V3, DEEPSEEK_V31]
FAMILIES += [DEEPSEEK_V32, DEEPSEEK_V4, LFM2, GEMMA4]
TYPED = {"city": HOSTILE, "days": "3", "tags": '["a", {"b": 1}]', "hot": "True", "note": "null"}
OBJECT = {"city": HOSTILE, "days": 3, "tags": ["a", {"b": 1}], "hot": True, "note": None}
ODD = {"days": "three", "kind": "x", "any": "[1", "more": "5"}
ODD_OBJECT = {"days": "three", "kind": "x", "any": "[1", "more": "5"}
THOUGHT = "<|channel|>analysis<|message|>Hm. {}<|end|>"
CALLED = "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
SAID = "<|channel|>commentary<|message|>I look.<|end|>"
FINAL = "<|channel|>final<|message|>Hello"

# Format, text, reasoning, content, calls.
Case = tuple[ToolCallFormat, str, str | None, str, list[tuple[str, Any]]]
CASES: list[Case] = [
    (QWEN3_CODER, f"Look. {qwen('f', **TYPED)}", None, "Look.", [("f", OBJECT)]),
    (QWEN3_CODER, qwen("f", **ODD), None, "", [("f", ODD_OBJECT)]),
    (
        QWEN3_CODER,
        qwen("f", any='{"a": "</parameter>", "b": ["</parameter>"]}', city="\n x \n"),
        None,
        "",
        [("f", {"any": {"a": "</parameter>", "b": ["</parameter>"]}, "city": "\n x \n"})],
    ),
    (QWEN3_CODER, qwen("f", any='"a', kind='"b'), None, "", [("f", {"any": '"a', "kind": '"b'})]),
    (GLM, glm("f", any="[1e999]"), None, "", [("f", {"any": [float("inf")]})]),
    (
        QWEN3_CODER,
        qwen("g") + "\n" + qwen("f", days="1"),
        None,
        "",
        [("g", {}), ("f", {"days": 1})],
    ),
    (
        QWEN3_CODER,
        qwen("f", city="a").removesuffix("\n</tool_call>"),
        None,
        "",
        [("f", {"city": "a"})],
    ),
    (GLM, glm("f", **TYPED) + "\nDone.", None, "Done.", [("f", OBJECT)]),
    (GLM, "<tool_call>g</tool_call>" + glm("f", **ODD), None, "", [("g", {}), ("f", ODD_OBJECT)]),
    (
        KIMI,
        "A. " + kimi(("f", '{"a": "}"}'), ("g", "{}")),
        None,
        "A.",
        [("f", {"a": "}"}), ("g", {})],
    ),
    (HARMONY, THOUGHT + CALLED + '{"a": 1}<|call|>', "Hm. {}", "", [("f", {"a": 1})]),
    (HARMONY, " to=functions.g<|channel|>commentary json<|message|>{}", None, "", [("g", {})]),
    (HARMONY, THOUGHT + "<|start|>assistant" + FINAL, "Hm. {}", "Hello", []),
    (HARMONY, FINAL + "<|return|>", None, "Hello", []),
    (
        HARMONY,
        "<|channel|>commentary<|message|>I look.<|end|>" + CALLED + "{}",
        None,
        "I look.",
        [("f", {})],
    ),
]
NO_CALLS = [
    (QWEN3_CODER, "Plain <tool_cal </tool_call> {} <function=f>"),
    (QWEN3_CODER, qwen("unknown", city="a")),
    (QWEN3_CODER, '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'),
    (QWEN3_CODER, "<tool_call>" + " " * 300 + "<func"),
    (QWEN3_CODER, "<tool_call>\n<function=" + "f" * 300 + ">"),
    (GLM, "<tool_call>unknown\n</tool_call>"),
    (GLM, "<tool_call>f"),
    (KIMI, "<|tool_calls_section_begin|>x"),
    (KIMI, kimi(("unknown", "{}"))),
    (KIMI, "<|tool_calls_section_begin|><|tool_call_begin|>f" + " " * 300 + "{"),
    (HARMONY, "Plain text, to=f and <|chan"),
    (HARMONY, "<|channel|>nonsense"),
]
CASES += [*NEWER_CALLS, *((form, text, None, text, []) for form, text in NO_CALLS + NEWER_TEXTS)]


def reader(form: ToolCallFormat) -> AnswerReader:
    reasoning = REASONING["harmony"] if form is HARMONY else None
    made = ChatFormat(True, form, reasoning).reader(CHAT, "", None)
    assert made is not None
    return made


def read(form: ToolCallFormat, pieces: Iterable[str]) -> list[Part]:
    answer = reader(form)
    parts = [part for piece in pieces for part in answer.push(piece, is_last=False)]
    return merged([*parts, *answer.push("", is_last=True)])


def merged(parts: Iterable[Part]) -> list[Part]:
    """The parts as if the text had come in one piece, without random ids."""
    found: list[Part] = []
    for part in parts:
        match found[-1] if found else None, part:
            case Content(before), Content(text):
                found[-1] = Content(before + text)
            case Reasoning(before), Reasoning(text):
                found[-1] = Reasoning(before + text)
            case CallArguments(index, before), CallArguments(same, text) if index == same:
                found[-1] = CallArguments(index, before + text)
            case _, CallStart(index, call_id, name) if call_id.startswith("call_"):
                found.append(CallStart(index, "call_", name))
            case _:
                found.append(part)
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0].name}:{case[1][:40]}")
def test_an_answer_is_read_the_same_wherever_it_is_cut(case: Case) -> None:
    form, text, reasoning, content, calls = case
    whole = read(form, [text])
    reply = reply_of(whole)
    assert (reply.reasoning, reply.content) == (reasoning, content)
    assert [(made.name, json.loads(made.arguments)) for made in reply.tool_calls] == calls
    assert read(form, text) == whole
    for cut in range(len(text) + 1):
        assert read(form, [text[:cut], text[cut:]]) == whole, cut


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0].name}:{case[1][:40]}")
def test_arguments_that_were_streamed_are_the_start_of_the_whole(case: Case) -> None:
    form, text, _, _, calls = case
    wholes = [made.arguments for made in reply_of(read(form, [text])).tool_calls]
    for cut in range(len(text) + 1):
        begun = reply_of(reader(form).push(text[:cut], is_last=True)).tool_calls
        assert len(begun) <= len(calls)
        for made, whole in zip(begun, wholes, strict=False):
            assert whole.startswith(made.arguments), cut


TAGS = [
    *("<minimax:tool_call>", "</minimax:tool_call>", '<invoke name="f">', "</invoke>"),
    *('<parameter name="days">', "<seed:tool_call>", "</seed:tool_call>"),
    *(
        token("tool calls begin"),
        token("tool call begin"),
        token("tool sep"),
        "function",
        "```json",
    ),
    *("```", token("tool call end"), token("tool calls end"), "<|tool_call_start|>", "f(", ")"),
    *("<|tool_call_end|>", "days=", "days:", "'", '"', "\\", "[", "]", ",", "{", "}", ":"),
    *("<|tool_call>", "call:f{", "<tool_call|>", '<|"|>'),
]
TAGS += [f"<{DSML}function_calls>", f"<{DSML}tool_calls>", f'<{DSML}invoke name="f">']
TAGS += [f'<{DSML}parameter name="days" string="false">', f"</{DSML}parameter>"]
TAGS += [f'<{DSML}parameter name="city" string="true">', f"</{DSML}invoke>", DSML]
TAGS += ["<tool_call>", "</tool_call>", "<function=f>", "</function>", "<parameter=days>"]
KEYS = ["</parameter>", "<arg_key>days</arg_key>", "<arg_value>", "</arg_value>", "f\n"]
WORDS = ["analysis", "final", "commentary", " to=functions.f", "assistant", "<", "|", ">", "\n"]
CALLS = [minimax(("f", {"days": "3"})), seed("f", days="3"), lfm2("f(days=3)"), gemma4("f{days:3}")]
CALLS += [deepseek_v31(("f", "{}")), deepseek_v3(("f", "{}"))]
CALLS += [qwen("f", days="3"), glm("f", days="3"), *kimi(("f", "")).split(":"), "{}", "3", "a", " "]
FRAGMENTS = st.sampled_from([*TAGS, *KEYS, *harmony.TOKENS, *WORDS, *CALLS])


@given(
    st.sampled_from(FAMILIES),
    st.lists(FRAGMENTS, max_size=14).map("".join),
    st.lists(st.integers(0, 250), max_size=6),
)
def test_no_text_is_read_otherwise_when_it_is_cut(
    form: ToolCallFormat, text: str, cuts: list[int]
) -> None:
    edges = [0, *sorted(cuts), len(text)]
    pieces = [text[start:end] for start, end in itertools.pairwise(edges)]
    whole = read(form, [text])
    assert read(form, pieces) == whole
    if not any(isinstance(part, CallStart) for part in whole) and form is not HARMONY:
        assert reply_of(whole).content == text


def test_a_models_own_id_of_a_call_is_kept() -> None:
    parts = read(KIMI, [kimi(("f", "{}"), ("g", "{}"))])
    ids = [part.id for part in parts if isinstance(part, CallStart)]
    assert ids == ["functions.f:0", "functions.g:1"]


def test_text_is_passed_on_while_it_comes() -> None:
    answer = reader(QWEN3_CODER)
    answer.push("<tool_call>\n<function=f>\n<parameter=city>\nPar", is_last=False)
    assert answer.push("is", is_last=False) == (CallArguments(0, "is"),)
    assert answer.push("\n</para", is_last=False) == ()


TEMPLATES = {
    "minimax_m2": '{{ tools }}<minimax:tool_call>{{ "<invoke name=" }}</minimax:tool_call>',
    "seed_oss": "{{ tools }}<seed:tool_call><function=f><parameter=a>",
    "deepseek_v31": "{{ tools }}" + deepseek_v31(("f", "")),
    "deepseek_v3": "{{ tools }}" + deepseek_v3(("f", "")),
    "deepseek_v32": "{{ tools }}{% set token = '" + DSML + "' %}<{{ token }}function_calls>",
    "deepseek_v4": "{{ tools }}{% set token = '" + DSML + "' %}<{{ token }}tool_calls>",
    "lfm2": "{{ tools }}<|tool_call_start|>[<|tool_call_end|>",
    "gemma4": "{{ tools }}<|tool_call>call:<tool_call|>",
    "harmony": "{{ tools }}<|start|>assistant<|channel|>final<|message|>",
    "kimi": "{{ tools }}<|tool_calls_section_begin|>",
    "glm": "{{ tools }}<tool_call>{{ f }}<arg_key>",
    "qwen3_coder": "{{ tools }}<tool_call><function=f><parameter=a>",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_chat_template_tells_the_family(name: str) -> None:
    chosen = choose(ChatTemplate(TEMPLATES[name], {}), "auto", "auto")
    assert chosen.tool_calls is FORMATS[name]
    assert (chosen.reasoning is REASONING["harmony"]) == (name == "harmony")


def test_reasoning_in_a_channel_is_left_out_where_it_is_not_wanted() -> None:
    chat = Conversation((Message("user", "Hi"),), include_reasoning=False)
    chat_format = ChatFormat(True, HARMONY, REASONING["harmony"])
    answer = chat_format.reader(chat, "", None)
    assert answer is not None and answer.thought is not None
    text = THOUGHT + "<|start|>assistant" + FINAL
    assert answer.push(text, is_last=True) == (Content("Hello"),)
    answer.thought.add(text, 20)
    assert 0 < answer.thought.count < 20
    assert set(chat_format.shown_tokens(chat)) == set(harmony.TOKENS)
