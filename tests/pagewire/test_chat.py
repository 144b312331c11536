"""Conversations with tools and reasoning, and several outputs, through both clients."""

import asyncio
import json

import pytest

import pagewire
from pagewire import Message, Tool, ToolCall
from pagewire._messages.conversation import to_messages
from pagewire.testing import FakeServer
from pagewire.v1 import inference_pb2 as pb

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = Tool("get_weather", "Weather of a city.", SCHEMA, strict=True)
CALLS = (
    ToolCall("call_1", "get_weather", '{"city": "Paris"}'),
    ToolCall("call_2", "get_weather", '{"city": "Rome"}'),
)
ANSWER = Message("assistant", "One moment, please.", reasoning="A tool knows.", tool_calls=CALLS)


def test_a_tool_is_called_and_its_result_goes_back_as_a_turn():
    def answer(prompt: str) -> str | Message:
        return f"It is {prompt}." if prompt == "rainy" else ANSWER

    with FakeServer(answer) as server, server.client() as client:
        turns: list[Message] = [Message("user", "Weather in Paris and Rome?")]
        asked = client.chat(turns, tools=[WEATHER])
        assert (asked.text, asked.reasoning) == ("One moment, please.", "A tool knows.")
        assert asked.tool_calls == CALLS
        turns += [asked.message, Message("tool", "rainy", tool_call_id=asked.tool_calls[0].id)]
        assert client.chat(turns, tools=[WEATHER]).text == "It is rainy."
    assert asked.message == ANSWER


def test_a_stream_makes_up_what_the_whole_answer_is():
    async def read(server: FakeServer) -> pagewire.Completion:
        async with server.async_client() as client:
            return await client.stream_chat("a", n=2, request_id="r").completion()

    with FakeServer(ANSWER) as server, server.client() as client:
        whole = client.chat("a", n=2, request_id="r")
        stream = client.stream_chat("a", n=2, request_id="r")
        deltas = list(stream)
        assert stream.completion() == asyncio.run(read(server)) == whole
        assert stream.text == ANSWER.content
    (other,) = whole.more
    assert (other.text, other.tool_calls, other.more) == (ANSWER.content, CALLS, ())
    assert [delta.index for delta in deltas] == [0] * 3 + [1] * 3
    assert [piece.index for piece in deltas[2].tool_calls] == [0, 1]


def test_pieces_of_a_call_are_put_together():
    pieces = [
        pb.ToolCallDelta(index=0, id="a", name="f"),
        pb.ToolCallDelta(index=0, arguments='{"x"'),
        pb.ToolCallDelta(index=1, id="b", name="g", arguments="{}"),
        pb.ToolCallDelta(index=0, arguments=": 1}"),
    ]
    assembly = pagewire._messages.answers.Assembly()
    for piece in pieces:
        assembly.read(pb.ChatStreamResponse(delta=pb.OutputDelta(tool_calls=[piece])))
    assembly.read(pb.ChatStreamResponse(delta=pb.OutputDelta(finish_reason=1)))
    assert assembly.completion().tool_calls == (
        ToolCall("a", "f", '{"x": 1}'),
        ToolCall("b", "g", "{}"),
    )


def test_every_option_of_a_chat_reaches_the_server():
    with FakeServer() as server, server.client() as client:
        client.chat(
            "a",
            n=3,
            tools=[WEATHER, Tool("now")],
            tool_choice=WEATHER,
            parallel_tool_calls=False,
            include_reasoning=False,
            chat_template_kwargs={"enable_thinking": False},
            continue_final_message=True,
        )
        client.stream_chat("a", tool_choice="none", add_generation_prompt=False).completion()
        client.chat("a")
    first, second, plain = (one.chat for one in server.received)
    assert server.received[0].options.n == 3
    assert [tool.name for tool in first.tools] == ["get_weather", "now"]
    assert json.loads(first.tools[0].parameters_json) == SCHEMA
    assert first.tools[0].strict and first.tools[0].description == "Weather of a city."
    assert not first.tools[1].HasField("parameters_json")
    assert (first.tool_mode, first.required_tool) == (pb.TOOL_MODE_REQUIRED, "get_weather")
    assert first.HasField("parallel_tool_calls") and not first.parallel_tool_calls
    assert first.HasField("include_reasoning") and not first.include_reasoning
    assert json.loads(first.chat_template_kwargs_json) == {"enable_thinking": False}
    assert first.continue_final_message
    assert second.tool_mode == pb.TOOL_MODE_NONE
    assert second.HasField("add_generation_prompt") and not second.add_generation_prompt
    assert plain == pb.ChatOptions()


def test_turns_may_be_mappings_with_the_fields_of_a_message():
    turns = [ANSWER, Message("tool", "rain", name="sky", tool_call_id="call_1")]
    as_mappings = [
        {"role": "assistant", "content": "One moment, please.", "reasoning": "A tool knows."}
        | {"tool_calls": CALLS},
        {"role": "tool", "content": "rain", "name": "sky", "tool_call_id": "call_1"},
    ]
    assert to_messages(as_mappings) == to_messages(turns)
    (made, _) = to_messages(turns)
    assert [call.id for call in made.tool_calls] == ["call_1", "call_2"]


@pytest.mark.parametrize(
    ("turn", "options", "problem"),
    [
        ({"role": "user"}, {}, r"messages\[0\]\.content: needs a string"),
        ({"content": "a"}, {}, r"messages\[0\]\.role: needs a string"),
        ({"role": "a", "content": "a", "x": 1}, {}, r"messages\[0\]\.x: not supported"),
        ({"role": "a", "tool_calls": [{}]}, {}, r"messages\[0\]\.tool_calls\[0\]\.function: needs"),
        ({"role": "a", "content": "", "name": 3}, {}, r"messages\[0\]\.name: needs a string"),
        (None, {"tools": [{"type": "function"}]}, r"tools\[0\]\.function: needs"),
        (None, {"tools": [Tool("f", parameters={"a": {1}})]}, r"tools\[0\]\.parameters: is not"),
        (None, {"tools": [Tool(3)]}, r"tools\[0\]\.name: 3 does not fit"),
        (None, {"tool_choice": "get_weather"}, "tool_choice: 'get_weather' is no Tool"),
        (None, {"chat_template_kwargs": {"a": {1}}}, "chat_template_kwargs: is not JSON"),
        (None, {"n": -1}, "n: -1 does not fit"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(turn, options, problem):
    with FakeServer() as server, server.client() as client:
        with pytest.raises(pagewire.InvalidArgument, match=problem):
            client.chat([turn or Message("user", "a")], **options)
        assert server.received == []


def test_tools_are_for_conversations_alone():
    with FakeServer() as server, server.client() as client:
        with pytest.raises(TypeError, match="tools"):
            client.generate("a", tools=[WEATHER])
        with pytest.raises(pagewire.InvalidArgument, match="tools: is for a conversation"):
            client.tokenize("a", tools=[WEATHER])
        with pytest.raises(TypeError, match="'max_tokens'"):
            client.tokenize("a", max_tokens=3)
        assert client.tokenize([Message("user", "ab")], tools=[WEATHER]) == (97, 98)


@pytest.mark.parametrize("num_outputs", [1, 2])
def test_a_stream_that_breaks_goes_on_with_reasoning_and_content(num_outputs):
    with FakeServer(ANSWER) as server, server.client() as client:
        server.fail_next(pagewire.Unavailable("gone"), after_words=2)
        resumed = client.stream_chat("a", n=num_outputs).completion()
    for output in (resumed, *resumed.more):
        assert (output.text, output.reasoning) == (ANSWER.content, ANSWER.reasoning)
    assert len(server.received) == 2
