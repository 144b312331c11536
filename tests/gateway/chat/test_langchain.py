"""A third-party client: chats, streams and tools through langchain-openai."""

from collections.abc import Callable
from typing import Any

import pytest
from langchain_core.messages import AIMessageChunk, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI

pytestmark = pytest.mark.asyncio(loop_scope="module")

CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>'
QUESTION = [HumanMessage("Weather in Paris?")]


@pytest.fixture
def model(running: Any, monkeypatch: pytest.MonkeyPatch) -> ChatOpenAI:
    monkeypatch.setenv("LANGSMITH_TRACING", "false")
    return ChatOpenAI(model="tiny", base_url=f"{running.http_url}/v1", api_key="none")


async def test_a_chat_is_answered_and_its_tokens_counted(
    model: ChatOpenAI, running: Any, encode: Callable[[str], list[int]]
) -> None:
    answer = await model.ainvoke(QUESTION)
    assert answer.text == "Hello world"
    assert answer.response_metadata["finish_reason"] == "stop"
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] == len(encode("Hello world"))


async def test_a_chat_is_streamed(model: ChatOpenAI) -> None:
    chunks = [chunk async for chunk in model.astream(QUESTION)]
    assert len(chunks) > 2
    assert "".join(chunk.text for chunk in chunks) == "Hello world"


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_tool_is_called_and_its_result_answered(
    is_streamed: bool,
    model: ChatOpenAI,
    running: Any,
    encode: Callable[[str], list[int]],
    weather: dict[str, Any],
) -> None:
    running.scheduler.output = encode(CALL)
    bound = model.bind_tools([weather])
    if is_streamed:
        asked: Any = AIMessageChunk("")
        async for chunk in bound.astream(QUESTION):
            asked = asked + chunk
    else:
        asked = await bound.ainvoke(QUESTION)
    (call,) = asked.tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Paris"})
    assert asked.response_metadata["finish_reason"] == "tool_calls"

    running.scheduler.output = encode("Rain.")
    result = ToolMessage("Rain.", tool_call_id=call["id"], name="get_weather")
    answer = await bound.ainvoke([*QUESTION, asked, result])
    assert answer.text == "Rain."
