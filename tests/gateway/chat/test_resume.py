"""Resumed streamed chats: reasoning, content and calls are as without a break."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from pagewire.v1 import inference_pb2 as pb
from pagewire.v1.inference_pb2_grpc import InferenceServiceStub

pytestmark = pytest.mark.asyncio(loop_scope="module")

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
ANSWER = f"<think>\nA tool will know.\n</think>\n\nWait.\n{CALL}\n{CALL}"


def parts_of(deltas: Sequence[pb.OutputDelta]) -> tuple[str, str, list[tuple[str, str]], list[int]]:
    """(text, reasoning, name and arguments of each call, number of ids per call)."""
    calls: dict[int, tuple[str, str]] = {}
    ids: dict[int, int] = {}
    for piece in (piece for delta in deltas for piece in delta.tool_calls):
        name, arguments = calls.get(piece.index, ("", ""))
        calls[piece.index] = (name + piece.name, arguments + piece.arguments)
        ids[piece.index] = ids.get(piece.index, 0) + bool(piece.id)
    text = "".join(delta.text for delta in deltas)
    return text, "".join(delta.reasoning for delta in deltas), [*calls.values()], [*ids.values()]


async def test_wherever_a_chat_broke_both_parts_make_up_the_whole(
    running: Any, encode: Callable[[str], list[int]], weather: dict[str, Any]
) -> None:
    running.scheduler.output = encode(ANSWER)
    function = weather["function"]
    tool = pb.Tool(name=function["name"], parameters_json=json.dumps(function["parameters"]))
    stub = InferenceServiceStub(running.channel)

    async def read(token_ids: Sequence[int]) -> list[pb.OutputDelta]:
        request = pb.ChatStreamRequest(
            messages=[pb.ChatMessage(role="user", content="Weather?")],
            options=pb.GenerationOptions(resume_token_ids=token_ids),
            chat=pb.ChatOptions(tools=[tool]),
        )
        return [message.delta async for message in stub.ChatStream(request)]

    whole = await read([])
    expected = parts_of(whole)
    assert expected[:2] == ("Wait.", "A tool will know.")
    assert expected[2:] == ([("get_weather", '{"city": "Paris"}')] * 2, [1, 1])
    assert len(whole) > 20
    for count in range(len(whole)):
        known = [token_id for delta in whole[:count] for token_id in delta.token_ids]
        assert parts_of([*whole[:count], *await read(known)]) == expected, count
