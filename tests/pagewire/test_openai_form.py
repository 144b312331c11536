"""Turns and tools in OpenAI's form, as dictionaries and as its library's objects."""

import pytest
from openai.types.chat import ChatCompletionMessage

import pagewire
from pagewire import Message, Tool, ToolCall
from pagewire._messages.conversation import to_chat_options, to_messages

CALL = {"id": "c1", "type": "function", "function": {"name": "get", "arguments": '{"a": 1}'}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FUNCTION = {"name": "get", "description": "Gets.", "parameters": SCHEMA, "strict": True}
ANSWER = Message("assistant", "", tool_calls=[ToolCall("c1", "get", '{"a": 1}')])


@pytest.mark.parametrize(
    ("turn", "expected"),
    [
        ({"role": "user", "content": [{"type": "text", "text": "a"}]}, Message("user", "a")),
        (
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}},
                    {"type": "text", "text": "b"},
                ],
            },
            Message("user", "a\nb"),
        ),
        ({"role": "assistant", "content": None, "tool_calls": [CALL]}, ANSWER),
        ({"role": "assistant", "content": "", "tool_calls": [CALL | {"index": 0}]}, ANSWER),
        (ChatCompletionMessage(role="assistant", content=None, tool_calls=[CALL]), ANSWER),
        (
            {"role": "assistant", "content": "a", "reasoning_content": "b"}
            | {"refusal": None, "audio": None, "annotations": [], "function_call": None}
            | {"tool_calls": None, "id": "m1", "provider_specific_fields": {"x": 1}},
            Message("assistant", "a", reasoning="b"),
        ),
        (
            {"role": "tool", "content": "9", "tool_call_id": "c1", "name": "get"},
            Message("tool", "9", name="get", tool_call_id="c1"),
        ),
    ],
)
def test_a_turn_is_read_as_the_message_it_is(turn: object, expected: Message) -> None:
    assert to_messages([turn]) == to_messages([expected])


@pytest.mark.parametrize(
    ("turn", "place"),
    [
        ({"role": "user", "content": [{"type": "image_url"}]}, r"content\[0\]\.type: 'image_url'"),
        ({"role": "user", "content": [{"type": "text"}]}, r"content\[0\]\.text: needs a string"),
        ({"role": "user", "content": ["a"]}, r"content\[0\]: needs a mapping, not str"),
        ({"role": "user", "content": {"type": "text"}}, "content: needs a string"),
        ({"role": "assistant", "content": "", "refusal": "no"}, "refusal: not supported"),
        ({"role": "assistant", "tool_calls": "[]"}, "tool_calls: needs a list"),
        (
            {"role": "assistant", "tool_calls": [CALL | {"type": "custom"}]},
            r"tool_calls\[0\]\.type: 'custom'",
        ),
        (
            {"role": "assistant", "tool_calls": [CALL | {"function": {"name": "get"}}]},
            r"tool_calls\[0\]\.function\.arguments: needs a string",
        ),
        ("hello", ": needs a mapping, not str"),
    ],
)
def test_a_turn_that_cannot_be_served_is_refused_at_its_place(turn: object, place: str) -> None:
    with pytest.raises(pagewire.InvalidArgument, match=rf"^messages\[1\]\.?{place}"):
        to_messages([Message("user", "a"), turn])


def test_tools_and_the_choice_of_one_are_read() -> None:
    given = {"tools": [{"type": "function", "function": FUNCTION}]}
    own = {"tools": [Tool("get", "Gets.", SCHEMA, strict=True)]}
    choice = {"type": "function", "function": {"name": "get"}}
    assert to_chat_options(given | {"tool_choice": choice}) == to_chat_options(
        own | {"tool_choice": own["tools"][0]}
    )


@pytest.mark.parametrize(
    ("options", "place"),
    [
        ({"tools": [{"type": "web_search"}]}, r"tools\[0\]\.type: 'web_search'"),
        ({"tools": [{"type": "function", "function": FUNCTION | {"x": 1}}]}, r"tools\[0\].*\.x: "),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.type: 'allowed_tools'"),
        ({"tool_choice": {"type": "function", "function": {}}}, "tool_choice.function.name"),
    ],
)
def test_a_tool_that_cannot_be_served_is_refused_at_its_place(options: dict, place: str) -> None:
    with pytest.raises(pagewire.InvalidArgument, match=place):
        to_chat_options(options)


def test_the_effort_of_reasoning_is_an_option() -> None:
    assert to_chat_options({"reasoning_effort": "low"}).reasoning_effort == "low"
    with pytest.raises(pagewire.InvalidArgument, match="reasoning_effort: 3 does not fit"):
        to_chat_options({"reasoning_effort": 3})
