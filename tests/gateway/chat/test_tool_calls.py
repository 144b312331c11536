"""Tool calls of every format, split at every place; text that is no call is unchanged."""

import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.chat.calls import Calls
from gateway.chat.conversation import ToolCall
from gateway.chat.formats import FORMATS, HERMES, LLAMA3_JSON, MISTRAL
from gateway.chat.parts import CallArguments, CallStart, Content, Part, reply_of
from gateway.chat.source import Parser
from gateway.chat.tool_format import ToolCallFormat

NAMES = frozenset({"f", "get_weather"})


@dataclass(frozen=True)
class Case:
    """A text, and its content and calls (name, arguments)."""

    format: ToolCallFormat
    text: str
    content: str
    calls: tuple[tuple[str, str], ...] = ()


def call(arguments: str = '{"a": 1}', name: str = "f", key: str = "arguments") -> str:
    return f'{{"name": "{name}", "{key}": {arguments}}}'


def hermes(*bodies: str) -> str:
    return "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)


TRICKY = '{"s": "a } ] \\" \\\\", "o": {"l": [1, {"x": "</tool_call>"}], "é": "😀;,"}}'
F = ("f", '{"a": 1}')
# With line breaks and controls in strings, and backslashes that escape nothing.
BROKEN = '{"s":\n "a\nb\r\n\tc\x01",\t"p": "\\d\\\' \\\n \\u00e9 \\\\ \\"}"}'
WHOLE = '{"s":\n "a\\nb\\r\\n\\tc\\u0001",\t"p": "\\\\d\\\\\' \\n \\u00e9 \\\\ \\"}"}'
REWRITTEN = json.dumps(json.loads(WHOLE), ensure_ascii=False)
ORDINARY = [
    Case(HERMES, hermes(call()), "", (F,)),
    Case(HERMES, hermes(call(), call(TRICKY, "get_weather")), "", (F, ("get_weather", TRICKY))),
    Case(HERMES, "Let me look.\n" + hermes(call()), "Let me look.", (F,)),
    Case(HERMES, hermes(call()) + "\n\nDone.", "Done.", (F,)),
    Case(HERMES, " \n" + hermes(call()) + " \n", "", (F,)),
    Case(HERMES, f"<tool_call>{call()}", "", (F,)),  # some models forget to close
    Case(HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>.', ".", (F,)),
    Case(HERMES, hermes('{"type": "function", "name": "f", "arguments": {}}'), "", (("f", "{}"),)),
    Case(HERMES, hermes('{"name": "f", "arguments": {"a": 1}, "id": {"x": "}"}}'), "", (F,)),
    Case(HERMES, hermes('{"arguments": {"a": 1}, "name": "f"}'), "", (F,)),
    Case(HERMES, hermes('{"name": "f"}'), "", (("f", "{}"),)),
    Case(HERMES, hermes(call('"{\\"a\\": 1}"')), "", (F,)),
    Case(HERMES, hermes(call("null")), "", (("f", "{}"),)),
    Case(HERMES, hermes(call('{"a": [1, ')), "", (("f", '{"a": [1, }\n</tool_call>'),)),
    Case(HERMES, hermes(call(BROKEN)), "", (("f", WHOLE),)),
    Case(HERMES, hermes(f'{{"arguments": {BROKEN}, "name": "f"}}'), "", (("f", REWRITTEN),)),
    Case(HERMES, hermes('{"id": "x", "arguments": {"a": 1}, "name": "f"}'), "", (F,)),
    Case(HERMES, hermes(call() + "\n" + call(TRICKY)), "", (F, ("f", TRICKY))),
    Case(HERMES, hermes(f"{call()}, {call()}") + " x", "x", (F, F)),
    Case(HERMES, hermes(f"[{call()},\n{call(TRICKY)}]"), "", (F, ("f", TRICKY))),
    Case(HERMES, hermes(f"[{call()}] {call()}") + hermes(call()), "", (F, F, F)),
    Case(HERMES, hermes(call()) + "</tool_call>\n</tool_call> Done.", "Done.", (F,)),
    Case(MISTRAL, f"[TOOL_CALLS]f{BROKEN}", "", (("f", WHOLE),)),
    Case(LLAMA3_JSON, call(BROKEN, key="parameters"), "", (("f", WHOLE),)),
    Case(LLAMA3_JSON, call(key="parameters"), "", (F,)),
    Case(LLAMA3_JSON, f" {call(key='parameters')}; {call(TRICKY)}\n", "", (F, ("f", TRICKY))),
    Case(LLAMA3_JSON, f"<|python_tag|>{call()};{call()}", "", (F, F)),
    Case(LLAMA3_JSON, f"{call()}\n{call()}; and so on", "; and so on", (F, F)),
    Case(LLAMA3_JSON, f"I call it: <|python_tag|>{call()}", "I call it:", (F,)),
    Case(LLAMA3_JSON, f"{call()} and that was it", "and that was it", (F,)),
    Case(MISTRAL, f"[TOOL_CALLS] [{call()}, {call(TRICKY)}]", "", (F, ("f", TRICKY))),
    Case(MISTRAL, f"[TOOL_CALLS][{call()}]", "", (F,)),
    Case(MISTRAL, f"Well.[TOOL_CALLS]f{TRICKY}", "Well.", (("f", TRICKY),)),
    Case(
        MISTRAL,
        '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]get_weather{}',
        "",
        (F, ("get_weather", "{}")),
    ),
    Case(MISTRAL, '[TOOL_CALLS]f[CALL_ID]abc123XYZ[ARGS]{"a": 1}', "", (F,)),
]
NO_CALLS = [
    (HERMES, "Plain text, {} and <tool_cal and </tool_call> too. \n"),
    (HERMES, "  <tool_call>\nnothing\n</tool_call>  "),
    (HERMES, hermes(call(name="unknown"))),
    (HERMES, hermes(call("[1]"))),
    (HERMES, hermes('{"name": "f", "arguments": {"a": 1}'.replace("f", "f\\x"))),
    (HERMES, hermes('{"name": 3, "arguments": {}}')),
    (HERMES, '<tool_call>{"name": "f", "argum'),
    (HERMES, '<tool_call>{"name": "f", "arguments": '),
    (HERMES, "<tool_call>"),
    (HERMES, "<tool_call><function=f>\n<parameter=a>1</parameter></function></tool_call>"),
    (LLAMA3_JSON, '{"answer": [1, 2, {"x": "}"}]} \n'),
    (LLAMA3_JSON, call(name="unknown")),
    (LLAMA3_JSON, f"Use {call()} for that."),
    (LLAMA3_JSON, '<|python_tag|>brave_search.call(query="x")'),
    (LLAMA3_JSON, '{"name": "f"'),
    (MISTRAL, "[TOOL_CALLS]"),
    (MISTRAL, f"[TOOL_CALLS]unknown{TRICKY}"),
    (MISTRAL, "[TOOL_CALLS][1, 2]"),
    (MISTRAL, "[TOOL_CALLS]" + "x" * 300 + "{}"),
    (MISTRAL, "[TOOL_CALL [TOOL_CALLS [x]"),
]
CASES = ORDINARY + [Case(form, text, text) for form, text in NO_CALLS]


def read(
    tool_format: ToolCallFormat, pieces: Iterable[str], max_calls: int | None = None
) -> list[Part]:
    numbers = itertools.count()

    def new_id() -> str:
        return f"id{next(numbers)}"

    parser = Parser(
        lambda source, events: tool_format.parse(source, Calls(NAMES, events, new_id, max_calls))
    )
    parts = [part for piece in pieces for part in parser.push(piece)]
    return parts + parser.push("", is_last=True)


def merge(parts: Sequence[Part]) -> list[Part]:
    """Merges adjacent parts of a kind, as if the text had come in one piece."""
    merged: list[Part] = []
    for part in parts:
        match merged[-1] if merged else None, part:
            case Content(before), Content(text):
                merged[-1] = Content(before + text)
            case CallArguments(index, before), CallArguments(same, text) if index == same:
                merged[-1] = CallArguments(index, before + text)
            case _:
                merged.append(part)
    return merged


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.format.name}:{case.text[:40]}")
def test_calls_and_content_are_told_apart(case: Case) -> None:
    reply = reply_of(read(case.format, [case.text]))
    assert reply.content == case.content
    assert [(made.name, made.arguments) for made in reply.tool_calls] == list(case.calls)
    assert [made.id for made in reply.tool_calls] == [f"id{i}" for i in range(len(case.calls))]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.format.name}:{case.text[:40]}")
def test_the_result_does_not_depend_on_where_the_text_is_cut(case: Case) -> None:
    whole = merge(read(case.format, [case.text]))
    assert merge(read(case.format, case.text)) == whole
    for cut in range(len(case.text) + 1):
        assert merge(read(case.format, [case.text[:cut], "", case.text[cut:]])) == whole, cut


FRAGMENTS = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>"),
        *("{", "}", "[", "]", ",", ";", ":", '"', "\\", " ", "\n", "f", "x", "<", "é😀"),
        *(call(), call(TRICKY), f"[{call()}]", '{"name": "f", "arguments": ', '"name": "f"'),
    ]
)


@given(
    st.sampled_from(list(FORMATS.values())),
    st.lists(FRAGMENTS, max_size=16).map("".join),
    st.lists(st.integers(0, 200), max_size=6),
)
def test_no_text_is_read_otherwise_when_it_is_cut_and_none_is_lost(
    tool_format: ToolCallFormat, text: str, cuts: list[int]
) -> None:
    edges = [0, *sorted(cuts), len(text)]
    pieces = [text[start:end] for start, end in itertools.pairwise(edges)]
    whole = read(tool_format, [text])
    assert merge(read(tool_format, pieces)) == merge(whole)
    if not any(isinstance(part, CallStart) for part in whole):
        assert reply_of(whole).content == text


@pytest.mark.parametrize("tool_format", [HERMES, LLAMA3_JSON, MISTRAL], ids=lambda form: form.name)
def test_arguments_are_passed_on_while_they_come(tool_format: ToolCallFormat) -> None:
    text = {
        HERMES: f"<tool_call>{call(TRICKY)}</tool_call>",
        LLAMA3_JSON: call(TRICKY),
        MISTRAL: f"[TOOL_CALLS][{call(TRICKY)}]",
    }[tool_format]
    fragments = [part.text for part in read(tool_format, text) if isinstance(part, CallArguments)]
    assert fragments == list(TRICKY)


def test_text_is_passed_on_at_once_unless_a_marker_may_begin_in_it() -> None:
    parser = Parser(lambda source, events: HERMES.parse(source, Calls(NAMES, events, str)))
    assert parser.push("Hello") == [Content("Hello")]
    assert parser.push(" <") == []
    assert parser.push("b> x") == [Content(" <b> x")]


def test_further_calls_are_dropped_when_one_is_allowed() -> None:
    text = f"One. {hermes(call(), call(TRICKY))} Done."
    reply = reply_of(read(HERMES, text, max_calls=1))
    assert reply.content == "One.Done."
    assert reply.tool_calls == (ToolCall("id0", *F),)


def test_arguments_that_were_shown_are_the_arguments_of_the_whole() -> None:
    reply = reply_of(read(HERMES, hermes(call(TRICKY))))
    assert json.loads(reply.tool_calls[0].arguments) == json.loads(TRICKY)
