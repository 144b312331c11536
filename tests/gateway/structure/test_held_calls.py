"""Answers of each family that a grammar of strict calls, or of a form, allows and refuses."""

import json
from dataclasses import replace
from typing import Any

import pytest

from gateway.chat.conversation import Conversation, Message, Rendering, Tool
from gateway.errors.request_errors import RequestError
from gateway.structure.calls import CallsInAnswer
from gateway.structure.structure import JsonSchema
from tests.gateway.chat.call_texts import (
    deepseek_v3,
    deepseek_v31,
    gemma4,
    lfm2,
    minimax,
    quoted,
    seed,
)
from tests.gateway.structure.test_call_walks import parse, setting
from wire.grammar import new_matcher

PROPERTIES: dict[str, Any] = {
    "city": {"type": "string", "maxLength": 8},
    "days": {"type": "integer"},
    "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "kind": {"$ref": "#/$defs/kind"},
    "where": {
        "type": "object",
        "properties": {"name": {"type": "string"}},
        "required": ["name"],
        "additionalProperties": False,
    },
    "date": {"type": "string", "format": "date"},
}
SCHEMA = {
    "type": "object",
    "properties": PROPERTIES,
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"kind": {"enum": ["x", "y"]}},
}
TOOLS = (Tool("look", None, SCHEMA, True), Tool("lookup"), Tool("any", None, {"type": "object"}))
CHAT = Conversation((Message("user", "Hello"),), TOOLS)
FORM = JsonSchema("response_format", {"type": "object", "properties": {"a": {"type": "integer"}}})


def tagged(**values: str) -> str:
    parts = "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in values.items())
    return f"<tool_call>\n<function=look>\n{parts}</function>\n</tool_call>"


def keyed(**values: str) -> str:
    parts = "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{text}</arg_value>\n" for key, text in values.items()
    )
    return f"<tool_call>look\n{parts}</tool_call>"


def section(arguments: str) -> str:
    call = f"<|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>{arguments}"
    return f"<|tool_calls_section_begin|>{call}<|tool_call_end|><|tool_calls_section_end|>"


LITERALS = {"city": "it", "days": 5, "kind": "x", "where": {"name": "a"}}
QUOTED = {"city": "a'\n", "note": None, "date": "2026-11-23"}
INVOKED = minimax(("look", {"city": "Paris"}), ("lookup", {}))
NEXT = "<|end|><|start|>assistant"
THOUGHT = "<|channel|>analysis<|message|>Hm {}" + NEXT
HEAD = "<|channel|>commentary to=functions.look <|constrain|>json<|message|>"
CALLED = HEAD + '{"city": "Paris"}'
BEFORE = ' to=functions.look<|channel|>commentary json<|message|>{"city": "Oslo"}'
SAID = "<|channel|>final<|message|>Hello <b>"
FORMED = '<|channel|>final<|message|>{"a": 1}'
PARIS = {"city": "Paris"}
ALL = {"days": "5", "note": "the end", "kind": "x", "where": '{"name": "</arg"}'}
ALL_JSON = {"days": 5, "note": "the end", "kind": "x", "where": {"name": "</arg"}}

# Format, answer, arguments of its calls.
ALLOWED: list[tuple[str, str, list[Any]]] = [
    ("qwen3_coder", tagged(city="Paris", **ALL), [PARIS | ALL_JSON]),
    (
        "qwen3_coder",
        "Hm. " + tagged(city='"a"', note="null") + " and",
        [{"city": '"a"', "note": None}],
    ),
    ("qwen3_coder", tagged(city="\n", date='"2026-11-23"'), [{"city": "\n", "date": "2026-11-23"}]),
    ("qwen3_coder", tagged(city="a") + tagged(city="b"), [{"city": "a"}, {"city": "b"}]),
    ("qwen3_coder", tagged().replace("look", "lookup"), [{}]),
    ("qwen3_coder", tagged(b="1", c="x").replace("look", "any"), [{"b": "1", "c": "x"}]),
    ("glm", keyed(city="Paris", **ALL) + "\nDone.", [PARIS | ALL_JSON]),
    ("glm", "<tool_call>lookup</tool_call>", [{}]),
    ("kimi", "A. " + section('{"city": "Paris"}'), [PARIS]),
    ("minimax_m2", f"A. {INVOKED} and", [PARIS, {}]),
    (
        "minimax_m2",
        minimax(("look", {"city": "Paris"} | ALL)) + INVOKED,
        [PARIS | ALL_JSON, PARIS, {}],
    ),
    ("minimax_m2", minimax(("any", {"b": "1"})), [{"b": "1"}]),
    (
        "seed_oss",
        seed("look", city="\n</para", days="5"),
        [{"city": "\n</para", "days": 5}],
    ),
    (
        "deepseek_v31",
        "A. " + deepseek_v31(("look", '{"city": "a"}'), ("any", "{}")),
        [{"city": "a"}, {}],
    ),
    (
        "deepseek_v3",
        deepseek_v3(("look", '{"city": "a"}'), ("any", "{}")) + " and",
        [{"city": "a"}, {}],
    ),
    ("lfm2", "A. " + lfm2("look(city='Paris')", "lookup()") + " B.", [PARIS, {}]),
    ("lfm2", lfm2("look(city='it', days=5, kind='x', where={\"name\": \"a\"})"), [LITERALS]),
    ("lfm2", lfm2('look(city="a\'\\n", note=null, date="2026-11-23")'), [QUOTED]),
    ("lfm2", lfm2("any(b='1', c=[1, {}])"), [{"b": "1", "c": [1, {}]}]),
    ("gemma4", "A. " + gemma4(f"look{{city:{quoted('Paris')}}}") + gemma4("lookup{}"), [PARIS, {}]),
    (
        "gemma4",
        gemma4(f'look{{city:{quoted("it")},days:5,kind:{quoted("x")},where:{{"name": "a"}}}}'),
        [LITERALS],
    ),
    ("gemma4", gemma4('look{city:"a\'\\n",note:null,date:"2026-11-23"}'), [QUOTED]),
    ("gemma4", gemma4(f"any{{b:{quoted('{}')},c:[1, {{}}]}}"), [{"b": "{}", "c": [1, {}]}]),
    ("harmony", THOUGHT + CALLED + "<|call|>", [PARIS]),
    ("harmony", CALLED + NEXT + BEFORE, [PARIS, {"city": "Oslo"}]),
    ("harmony", THOUGHT + SAID, []),
    ("harmony", "plain, to=functions.look", []),
    ("harmony", "goes on" + NEXT + CALLED, [PARIS]),
]
REFUSED = [
    ("qwen3_coder", tagged()),
    ("qwen3_coder", tagged(city="nine char")),
    ("qwen3_coder", tagged(city="a", days="x")),
    ("qwen3_coder", tagged(city="a", kind="z")),
    ("qwen3_coder", tagged(city="a", other="1")),
    ("qwen3_coder", tagged(city="a", note='"a"')),
    ("qwen3_coder", "<tool_call>\n<function=unknown>\n</function>\n</tool_call>"),
    ("glm", keyed(days="1")),
    ("glm", "<tool_call>look</tool_call>"),
    ("kimi", section('{"city": 5}')),
    ("kimi", "<|tool_calls_section_begin|>no"),
    ("minimax_m2", minimax(("look", {"days": "5"}))),
    ("minimax_m2", minimax(("look", {"city": "a", "days": "x"}))),
    ("minimax_m2", minimax(("look", {"city": "a"}), ("unknown", {}))),
    ("seed_oss", seed("look", city="nine char")),
    ("deepseek_v31", deepseek_v31(("look", '{"city": 5}'))),
    ("deepseek_v31", deepseek_v3(("look", '{"city": "a"}'))),
    ("deepseek_v3", deepseek_v3(("look", "{}"))),
    ("lfm2", lfm2("look()")),
    ("lfm2", lfm2("look(city='nine char')")),
    ("lfm2", lfm2("look(days=5, city='a')")),
    ("lfm2", lfm2("look(city='a', kind='z')")),
    ("lfm2", lfm2("look(city='a',)")),
    ("lfm2", lfm2("look(city='a', other=1)")),
    ("lfm2", lfm2("unknown()")),
    ("gemma4", gemma4("look{}")),
    ("gemma4", gemma4("look{city:a}")),
    ("gemma4", gemma4(f"look{{city:{quoted('nine char')}}}")),
    ("gemma4", gemma4(f"look{{city:{quoted('a')},days:{quoted('5')}}}")),
    ("gemma4", gemma4("unknown{}")),
    ("harmony", HEAD + '{"city": 5}'),
    ("harmony", THOUGHT + HEAD + "no"),
    ("harmony", CALLED + " more"),
    ("harmony", CALLED.replace("look", "unknown")),
]


def accepts(
    name: str, text: str, *, has_tokens: bool = True, form: Any = None, chat: Any = CHAT
) -> bool:
    where = setting(name, has_tokens)
    structure = where.chat_format.structure(chat, form)
    assert structure is not None
    matcher = new_matcher(where.vocabulary, structure.to_grammar())
    ids = where.tokenizer.encode(text, add_special_tokens=False).ids
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


@pytest.mark.parametrize(("name", "text", "arguments"), ALLOWED)
def test_what_follows_the_schemas_is_allowed_and_read(
    name: str, text: str, arguments: list[Any]
) -> None:
    where = setting(name, True)
    structure = where.chat_format.structure(CHAT, None)
    assert structure is not None and not isinstance(structure, JsonSchema)
    for has_tokens in {True, name == "harmony"}:
        assert accepts(name, text, has_tokens=has_tokens)
    calls = parse(where.chat_format, CHAT, structure, [text]).tool_calls
    assert [json.loads(call.arguments) for call in calls] == arguments


@pytest.mark.parametrize(("name", "text"), REFUSED)
def test_a_call_that_breaks_its_schema_is_not_allowed(name: str, text: str) -> None:
    for has_tokens in {True, name == "harmony"}:
        assert not accepts(name, text, has_tokens=has_tokens)


def test_one_call_is_allowed_where_calls_are_not_parallel() -> None:
    one = replace(CHAT, parallel_tool_calls=False)
    for name, text in (
        ("harmony", CALLED),
        ("glm", keyed(city="a")),
        ("kimi", section('{"city": "a"}')),
        ("minimax_m2", minimax(("look", {"city": "a"}))),
    ):
        assert accepts(name, text, chat=one)
        assert not accepts(
            name, (text + NEXT + BEFORE) if name == "harmony" else text * 2, chat=one
        )


def test_calls_of_one_section_are_one_call_where_they_are_not_parallel() -> None:
    one = replace(CHAT, parallel_tool_calls=False)
    for name, text in (
        ("minimax_m2", INVOKED),
        ("deepseek_v31", deepseek_v31(("look", '{"city": "a"}'), ("any", "{}"))),
        ("lfm2", lfm2("look(city='a')", "any()")),
        ("gemma4", gemma4("any{}") * 2),
    ):
        assert accepts(name, text) and not accepts(name, text, chat=one)


@pytest.mark.parametrize("name", ["deepseek_v32", "deepseek_v4"])
def test_calls_that_no_grammar_can_hold_are_refused(name: str) -> None:
    chat_format = setting(name, True).chat_format
    for form, field in ((None, "tools"), (FORM, "response_format")):
        with pytest.raises(RequestError, match="this model's format") as refused:
            chat_format.structure(CHAT, form)
        assert refused.value.field == field
    loose = replace(CHAT, tools=TOOLS[1:])
    assert chat_format.structure(loose, None) is None


def test_with_a_form_channels_hold_thoughts_and_then_the_form_or_calls() -> None:
    for text in (FORMED, THOUGHT + FORMED, THOUGHT + THOUGHT + CALLED, CALLED + NEXT + BEFORE):
        assert accepts("harmony", text, form=FORM), text
    for text in (SAID, "", "{}", THOUGHT + SAID, CALLED + NEXT + FORMED, FORMED + "<|end|>"):
        assert not accepts("harmony", text, form=FORM), text


def test_a_form_alone_comes_in_its_channel_and_is_read_whole() -> None:
    where, chat = setting("harmony", True), replace(CHAT, tools=())
    structure = where.chat_format.structure(chat, FORM)
    assert structure is not None
    assert accepts("harmony", THOUGHT + FORMED, form=FORM, chat=chat)
    assert not accepts("harmony", THOUGHT + CALLED, form=FORM, chat=chat)
    answer = parse(where.chat_format, chat, structure, [THOUGHT, FORMED[:-1], ', "b": "<|end|>"}'])
    assert (answer.reasoning, answer.content) == ("Hm {}", '{"a": 1, "b": "<|end|>"}')
    goes_on = replace(chat, rendering=Rendering(continue_final_message=True))
    assert where.chat_format.structure(goes_on, FORM) is FORM


DEFINED: Any = {
    "$defs": {
        "A": {"$ref": "#/$defs/B"},
        "B": {
            "type": "object",
            "properties": {"days": {"$ref": "#/$defs/N"}, "city": {"type": "string"}},
            "required": ["days"],
            "additionalProperties": False,
        },
        "N": {"type": "integer"},
    }
}


@pytest.mark.parametrize("top", [{"$ref": "#/$defs/A"}, {"allOf": [{"$ref": "#/$defs/B"}]}])
def test_arguments_are_found_where_a_schema_is_a_reference(top: Any) -> None:
    chat = replace(CHAT, tools=(Tool("look", None, top | DEFINED, True),))
    text = tagged(days="5", city="</paramete")
    assert accepts("qwen3_coder", text, chat=chat)
    for refused in (tagged(city="a"), tagged(days="x"), tagged(days="5", other="a")):
        assert not accepts("qwen3_coder", refused, chat=chat)
    where = setting("qwen3_coder", True)
    structure = where.chat_format.structure(chat, None)
    assert isinstance(structure, CallsInAnswer)
    (call,) = parse(where.chat_format, chat, structure, [text]).tool_calls
    assert json.loads(call.arguments) == {"days": 5, "city": "</paramete"}


def test_text_under_a_grammar_ends_with_its_own_tag_alone() -> None:
    where = setting("qwen3_coder", True)
    structure = where.chat_format.structure(CHAT, None)
    assert isinstance(structure, CallsInAnswer)
    any_text = "a\n<parameter=b>\nx\n</function>\n</tool_call>"
    text = tagged(c=any_text).replace("look", "any")
    assert accepts("qwen3_coder", text, has_tokens=False)
    (call,) = parse(where.chat_format, CHAT, structure, [text]).tool_calls
    assert json.loads(call.arguments) == {"c": any_text}


UNWRITABLE: list[tuple[str, Tool, str]] = [
    ("glm", Tool("a b", None, SCHEMA, True), "tools[0].function.name"),
    ("lfm2", Tool("a b", None, SCHEMA, True), "tools[0].function.name"),
    (
        "gemma4",
        Tool("f", None, {"type": "object", "properties": {"a b": {}}}, True),
        'tools[0].function.parameters.properties["a b"]',
    ),
    (
        "lfm2",
        Tool("f", None, {"additionalProperties": {"type": "integer"}}, True),
        "tools[0].function.parameters.additionalProperties",
    ),
    (
        "gemma4",
        Tool("f", None, {"properties": {"a": {"contains": {}}}}, True),
        "tools[0].function.parameters.properties.a.contains",
    ),
    ("kimi", Tool("a:b", None, SCHEMA, True), "tools[0].function.name"),
    (
        "glm",
        Tool("f", None, {"type": "object", "properties": {"<a": {}}}, True),
        'tools[0].function.parameters.properties["<a"]',
    ),
    (
        "minimax_m2",
        Tool("f", None, {"type": "object", "properties": {'a"': {}}}, True),
        'tools[0].function.parameters.properties["a\\""]',
    ),
    (
        "qwen3_coder",
        Tool("f", None, {"anyOf": [SCHEMA]}, True),
        "tools[0].function.parameters.anyOf",
    ),
    (
        "qwen3_coder",
        Tool("f", None, {"additionalProperties": {"type": "integer"}}, True),
        "tools[0].function.parameters.additionalProperties",
    ),
    (
        "qwen3_coder",
        Tool("f", None, {"properties": {"a": {"contains": {}}}}, True),
        "tools[0].function.parameters.properties.a.contains",
    ),
]


@pytest.mark.parametrize(("name", "tool", "field"), UNWRITABLE)
def test_what_a_family_cannot_write_is_refused_by_its_place(
    name: str, tool: Tool, field: str
) -> None:
    chat = replace(CHAT, tools=(tool,))
    structure = setting(name, True).chat_format.structure(chat, None)
    assert structure is not None
    with pytest.raises(RequestError) as refused:
        structure.to_grammar()
    assert refused.value.field == field
    if field.endswith("name"):
        return
    loose = replace(chat, tools=(replace(tool, is_strict=False),))
    held = setting(name, True).chat_format.structure(loose, FORM)
    assert held is not None
    held.to_grammar()
