"""Tools and reasoning over gRPC."""

import json
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from pagewire.v1 import inference_pb2 as pb
from pagewire.v1 import types_pb2
from pagewire.v1.inference_pb2_grpc import InferenceServiceStub

pytestmark = pytest.mark.asyncio(loop_scope="module")

ARGUMENTS = '{"city": "Paris"}'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
ANSWER = f"<think>\nA tool will know.\n</think>\n\nWait.\n{CALL}"
USER = pb.ChatMessage(role="user", content="Weather in Paris?")


@pytest.fixture
def options(weather: dict[str, Any]) -> pb.ChatOptions:
    function = weather["function"]
    tool = pb.Tool(
        name=function["name"],
        description=function["description"],
        parameters_json=json.dumps(function["parameters"]),
    )
    return pb.ChatOptions(tools=[tool])


async def test_a_chat_gives_content_reasoning_and_calls_apart(
    running: Any, encode: Callable[[str], list[int]], options: pb.ChatOptions
) -> None:
    running.scheduler.output = encode(ANSWER)
    stub = InferenceServiceStub(running.channel)
    output = (await stub.Chat(pb.ChatRequest(messages=[USER], chat=options))).output
    assert (output.text, output.reasoning) == ("Wait.", "A tool will know.")
    (call,) = output.tool_calls
    assert (call.name, call.arguments) == ("get_weather", ARGUMENTS)
    assert output.finish_reason == types_pb2.FINISH_REASON_STOP
    assert output.token_ids == encode(ANSWER)


async def test_a_streamed_chat_gives_the_same_in_pieces(
    running: Any, encode: Callable[[str], list[int]], options: pb.ChatOptions
) -> None:
    running.scheduler.output = encode(ANSWER)
    stub = InferenceServiceStub(running.channel)
    request = pb.ChatStreamRequest(messages=[USER], chat=options)
    deltas = [response.delta async for response in stub.ChatStream(request)]
    assert "".join(delta.text for delta in deltas) == "Wait."
    assert "".join(delta.reasoning for delta in deltas) == "A tool will know."
    first, *rest = [piece for delta in deltas for piece in delta.tool_calls]
    assert first.id
    assert (first.name, first.index, first.arguments) == ("get_weather", 0, "")
    assert len(rest) > 1
    assert not any(piece.id or piece.name for piece in rest)
    assert "".join(piece.arguments for piece in rest) == ARGUMENTS
    assert [token_id for delta in deltas for token_id in delta.token_ids] == encode(ANSWER)


async def test_http_and_grpc_make_the_same_prompt_of_the_same_conversation(
    running: Any, options: pb.ChatOptions, weather: dict[str, Any]
) -> None:
    function = {"name": "get_weather", "arguments": ARGUMENTS}
    turns = [
        {"role": "user", "content": "Weather in Paris?", "name": "Ada"},
        {
            "role": "assistant",
            "reasoning_content": "A tool will know.",
            "tool_calls": [{"id": "call_1", "type": "function", "function": function}],
        },
        {"role": "tool", "content": "Rain.", "tool_call_id": "call_1"},
    ]
    kwargs = {"enable_thinking": False}
    body = {"messages": turns, "tools": [weather], "chat_template_kwargs": kwargs}
    response = await running.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text

    options.chat_template_kwargs_json = json.dumps(kwargs)
    messages = [
        pb.ChatMessage(role="user", content="Weather in Paris?", name="Ada"),
        pb.ChatMessage(
            role="assistant",
            reasoning="A tool will know.",
            tool_calls=[pb.ToolCall(id="call_1", name="get_weather", arguments=ARGUMENTS)],
        ),
        pb.ChatMessage(role="tool", content="Rain.", tool_call_id="call_1"),
    ]
    stub = InferenceServiceStub(running.channel)
    await stub.Chat(pb.ChatRequest(messages=messages, chat=options))
    assert running.scheduler.prompt_of(0) == running.scheduler.prompt_of(1)
    conversation = pb.Conversation(messages=messages, chat=options)
    tokenized = await stub.Tokenize(pb.TokenizeRequest(conversation=conversation))
    assert list(tokenized.token_ids) == running.scheduler.prompt_of(0)


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("tools[0].parameters_json", {"tools": [pb.Tool(name="f", parameters_json="[]")]}),
        ("tools[0].function.name", {"tools": [pb.Tool()]}),
        ("tool_mode", {"tool_mode": 9}),
        ("required_tool", {"required_tool": "f"}),
        ("chat_template_kwargs_json", {"chat_template_kwargs_json": "{"}),
        ("chat_template_kwargs.x", {"chat_template_kwargs_json": '{"x": 1}'}),
        (
            "continue_final_message",
            {"continue_final_message": True, "add_generation_prompt": True},
        ),
    ],
)
async def test_what_cannot_be_is_refused_by_name(
    field: str, fields: dict[str, Any], running: Any
) -> None:
    stub = InferenceServiceStub(running.channel)
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await stub.Chat(pb.ChatRequest(messages=[USER], chat=pb.ChatOptions(**fields)))
    assert refusal.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert (refusal.value.details() or "").startswith(f"{field}: ")
