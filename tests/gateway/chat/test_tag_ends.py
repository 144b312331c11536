"""Calls between tags whose text spells tags, forgets them, or comes without the outer ones."""

import json
from collections.abc import Iterable
from typing import Any

import pytest

from gateway.chat.answer import ChatFormat
from gateway.chat.conversation import Conversation, Message, Tool
from gateway.chat.families.typed_values import as_json, is_text
from gateway.chat.formats import GLM, QWEN3_CODER
from gateway.chat.parts import CallArguments, Part, reply_of
from gateway.chat.tool_format import ToolCallFormat
from tests.gateway.chat.call_texts import glm, qwen
from tests.gateway.chat.test_call_families import merged

SCHEMA: Any = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "text": {"type": "string"},
        "days": {"type": "integer"},
        "tags": {"type": "array"},
    },
}
CHAT = Conversation((Message("user", "Hi"),), (Tool("write", None, SCHEMA), Tool("g")))


def read(form: ToolCallFormat, pieces: Iterable[str], *, is_complete: bool = True) -> list[Part]:
    answer = ChatFormat(True, form).reader(CHAT, "", None)
    assert answer is not None
    parts = [part for piece in pieces for part in answer.push(piece, is_last=False)]
    return merged([*parts, *answer.push("", is_last=True, is_complete=is_complete)])


# Text that an agent writes: about this very format.
ABOUT = "a </parameter> b </function> c </tool_call> d <parameter=other> <function=g> e"
LINES = "x\n</parameter>\n\ny\n</function>\nz\n</tool_call>\nend"
KEYS = "a </arg_value> b <arg_key> c <arg_key>other</arg_key> d </tool_call> e"
G: tuple[str, Any] = ("g", {})
WRITE = ("write", {"path": "a", "days": 3})
BARE = "<function=write><parameter=path>a</parameter><parameter=days>3</parameter></function>"
HEAD = "<tool_call>\n<function=write>\n<parameter=path>\na"
GLM_HEAD = "<tool_call>write\n<arg_key>path</arg_key><arg_value>a"
NEXT = "<tool_call>\n<function=g>\n</function>\n</tool_call>"

# Format, text, content, calls.
CASES: list[tuple[ToolCallFormat, str, str, list[tuple[str, Any]]]] = [
    # Tags in text.
    (
        QWEN3_CODER,
        qwen("write", path="p", text=ABOUT, days="3"),
        "",
        [("write", {"path": "p", "text": ABOUT, "days": 3})],
    ),
    (QWEN3_CODER, qwen("write", text=LINES), "", [("write", {"text": LINES})]),
    (QWEN3_CODER, qwen("write", text="</parameter>"), "", [("write", {"text": "</parameter>"})]),
    (
        QWEN3_CODER,
        qwen("write", text="a</parameter></paramete", path="</function>"),
        "",
        [("write", {"text": "a</parameter></paramete", "path": "</function>"})],
    ),
    (
        QWEN3_CODER,
        qwen("write", tags='{"a": "</function></tool_call><parameter=days>"}', path="p"),
        "",
        [("write", {"tags": {"a": "</function></tool_call><parameter=days>"}, "path": "p"})],
    ),
    (
        QWEN3_CODER,
        qwen("write", tags='["</parameter>\\n<parameter=path>"]', path="p"),
        "",
        [("write", {"tags": ["</parameter>\n<parameter=path>"], "path": "p"})],
    ),
    (GLM, glm("write", text=KEYS, days="3"), "", [("write", {"text": KEYS, "days": 3})]),
    # A value's own tag is missing.
    (QWEN3_CODER, HEAD + "\n</function>\n</tool_call>", "", [("write", {"path": "a"})]),
    (QWEN3_CODER, HEAD + "</function></tool_call>\n" + NEXT, "", [("write", {"path": "a"}), G]),
    (QWEN3_CODER, HEAD + "\n</function>\n", "", [("write", {"path": "a"})]),
    (QWEN3_CODER, HEAD + "\n</tool_call>\n" + NEXT, "", [("write", {"path": "a"}), G]),
    (QWEN3_CODER, HEAD + "\n</tool_call>", "", [("write", {"path": "a"})]),
    (QWEN3_CODER, HEAD + "</function><function=g></function>", "", [("write", {"path": "a"}), G]),
    (QWEN3_CODER, HEAD + "\n<parameter=days>\n3\n</function>\n</tool_call>", "", [WRITE]),
    (QWEN3_CODER, HEAD + "<parameter=days>3</parameter></function></tool_call>", "", [WRITE]),
    (
        QWEN3_CODER,
        HEAD + " <parameter=path> b\n</parameter>\n</function>\n</tool_call>",
        "",
        [("write", {"path": "a <parameter=path> b"})],  # it has that already
    ),
    (GLM, GLM_HEAD + "<arg_key>days</arg_key><arg_value>3</arg_value></tool_call>", "", [WRITE]),
    (GLM, GLM_HEAD + "</tool_call><tool_call>g\n</tool_call>", "", [("write", {"path": "a"}), G]),
    (GLM, GLM_HEAD + "</tool_call>", "", [("write", {"path": "a"})]),
    # The model ends the output in the middle.
    (QWEN3_CODER, HEAD, "", [("write", {"path": "a"})]),
    (QWEN3_CODER, HEAD + "\n</para", "", [("write", {"path": "a"})]),
    (QWEN3_CODER, HEAD + "\n</parameter>\n<param", "", [("write", {"path": "a"})]),
    (QWEN3_CODER, HEAD + "\n</parameter>\n</func", "", [("write", {"path": "a"})]),
    (QWEN3_CODER, HEAD.replace("path>\na", "tags>\n[1"), "", [("write", {"tags": "[1"})]),
    (QWEN3_CODER, "<tool_call>\n<function=write>\n", "", [("write", {})]),
    (GLM, GLM_HEAD, "", [("write", {"path": "a"})]),
    # Without the outer tag, or with several functions in it.
    (QWEN3_CODER, "Well.\n" + BARE + "\nDone.", "Well.Done.", [WRITE]),
    (QWEN3_CODER, BARE + "\n</tool_call>", "", [WRITE]),
    (QWEN3_CODER, BARE + BARE + "<function=g>\n</function>", "", [WRITE, WRITE, G]),
    (QWEN3_CODER, f"<tool_call>\n{BARE}\n{BARE}\n</tool_call>\n", "", [WRITE, WRITE]),
    (QWEN3_CODER, f"<tool_call>{BARE}</tool_call></tool_call> </function> x", "x", [WRITE]),
    (GLM, glm("g") + "\n</tool_call>\n", "", [G]),
    (QWEN3_CODER, "Use <function=g> and more.", "Use <function=g> and more.", []),
    (QWEN3_CODER, "A " + BARE.replace("write", "x"), "A " + BARE.replace("write", "x"), []),
]


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_a_call_is_read_the_same_wherever_it_is_cut(
    case: tuple[ToolCallFormat, str, str, list[tuple[str, Any]]],
) -> None:
    form, text, content, calls = case
    whole = read(form, [text])
    reply = reply_of(whole)
    assert [(made.name, json.loads(made.arguments)) for made in reply.tool_calls] == calls
    assert reply.content == content
    assert read(form, text) == whole
    for cut in range(len(text) + 1):
        assert read(form, [text[:cut], text[cut:]]) == whole, cut


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_an_output_that_ends_by_itself_leaves_no_arguments_open(
    case: tuple[ToolCallFormat, str, str, list[tuple[str, Any]]],
) -> None:
    form, text, _, _ = case
    wholes = [made.arguments for made in reply_of(read(form, [text])).tool_calls]
    for cut in range(len(text) + 1):
        for made in reply_of(read(form, [text[:cut]])).tool_calls:
            assert isinstance(json.loads(made.arguments), dict), cut
        by_length = reply_of(read(form, [text[:cut]], is_complete=False)).tool_calls
        for made, whole in zip(by_length, wholes, strict=False):
            assert whole.startswith(made.arguments), cut


def test_text_is_held_back_only_where_it_may_end() -> None:
    answer = ChatFormat(True, QWEN3_CODER).reader(CHAT, "", None)
    assert answer is not None
    answer.push("<tool_call><function=write><parameter=text>\nOne", is_last=False)
    assert answer.push(" </parameter", is_last=False) == (CallArguments(0, " "),)
    assert answer.push(">\n", is_last=False) == ()
    assert answer.push("x", is_last=False) == (CallArguments(0, "</parameter>\\nx"),)


NUMBER = {"type": "integer"}
ARGUMENTS = {"type": "object", "properties": {"n": NUMBER, "o": {"type": "object"}}}
DEFINED = {"$defs": {"A": ARGUMENTS, "N": NUMBER, "S": {"type": "string"}}}
COMBINED: list[Any] = [
    {"$ref": "#/$defs/A"} | DEFINED,
    {"allOf": [{"$ref": "#/$defs/A"}, {"properties": {"s": {"type": "string"}}}]} | DEFINED,
    {"anyOf": [{"properties": {"s": {"type": "string"}}}, ARGUMENTS]},
    {"oneOf": [{"$ref": "#/$defs/B"}]} | {"$defs": {"B": {"allOf": [ARGUMENTS]}}},
    {"$ref": "#/definitions/x~1y"} | {"definitions": {"x/y": ARGUMENTS}},
    {"if": {}, "then": ARGUMENTS},
    {"properties": {"n": {"allOf": [{"$ref": "#/$defs/N"}]}, "o": {"$ref": "#/x/0"}}, "x": [{}]}
    | DEFINED,
    {"additionalProperties": {"type": ["integer", "object"]}},
    {"properties": {"n": {"oneOf": [NUMBER, {"type": "null"}]}, "o": {}}},
]


@pytest.mark.parametrize("parameters", COMBINED, ids=range(len(COMBINED)))
def test_numbers_and_objects_are_found_through_references_and_combinations(
    parameters: Any,
) -> None:
    assert not is_text(parameters, "n") and not is_text(parameters, "o")
    assert as_json("5", parameters, "n") == "5"
    assert json.loads(as_json('{"a": "x\ny"}', parameters, "o")) == {"a": "x\ny"}


def test_text_stays_text_behind_them() -> None:
    for part in ({"$ref": "#/$defs/S"}, {"allOf": [{"$ref": "#/$defs/S"}]}, {"const": "a"}):
        parameters = {"allOf": [{"properties": {"s": part}}]} | DEFINED
        assert is_text(parameters, "s") or as_json("5", parameters, "s") == '"5"'


@pytest.mark.parametrize(
    "parameters",
    [
        {"$ref": "#"},
        {"$defs": {"A": {"anyOf": [{"$ref": "#/$defs/A"}] * 8}}, "anyOf": [{"$ref": "#/$defs/A"}]},
        {"allOf": [{"allOf": [{"allOf": [{}] * 100}] * 100}] * 100},
        {"$ref": ["#"], "anyOf": "x", "properties": ["n"], "oneOf": [1, None]},
        {"properties": {"n": {"anyOf": [{"$ref": "#/properties/n"}] * 50}}},
    ],
    ids=range(5),
)
def test_schemas_that_name_themselves_or_are_none_end(parameters: Any) -> None:
    assert as_json("5", parameters, "n") in ("5", '"5"')
    assert is_text(parameters, "n") in (True, False)
