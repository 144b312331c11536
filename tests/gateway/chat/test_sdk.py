"""Tools and reasoning through the SDK, with a scripted scheduler."""

from collections.abc import Callable
from typing import Any

import pytest

import pagewire
from pagewire import Message, Tool

pytestmark = pytest.mark.asyncio(loop_scope="module")

ARGUMENTS = '{"city": "Paris"}'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
ANSWER = f"<think>\nA tool will know.\n</think>\n\nWait.\n{CALL}"
USER = Message("user", "Weather in Paris?")


@pytest.fixture
def tool(weather: dict[str, Any]) -> Tool:
    return Tool(**weather["function"])


async def test_an_answer_is_told_apart_and_goes_back_into_the_conversation(
    running: Any, encode: Callable[[str], list[int]], tool: Tool
) -> None:
    running.scheduler.output = encode(ANSWER)
    async with pagewire.AsyncClient(running.grpc_target) as client:
        answer = await client.chat([USER], tools=[tool], temperature=0.5, n=2)
        streamed = await client.stream_chat([USER], tools=[tool]).completion()
        hidden = await client.chat([USER], tools=[tool], include_reasoning=False)
        for one in (answer, *answer.more, streamed):
            assert (one.text, one.reasoning) == ("Wait.", "A tool will know.")
            (call,) = one.tool_calls
            assert (call.name, call.arguments) == ("get_weather", ARGUMENTS) and call.id
        assert (hidden.reasoning, hidden.text) == ("", "Wait.")
        result = Message("tool", "Rain.", tool_call_id=call.id)
        turns = [USER, answer.message, result]
        num_before = len(running.scheduler.submits)
        await client.chat(turns, tools=[tool])
        prompt = running.scheduler.prompt_of(num_before)
        assert prompt == list(await client.tokenize(turns, tools=[tool]))
        assert len(prompt) > len(running.scheduler.prompt_of(0))
        with pytest.raises(pagewire.InvalidArgument, match="tool_choice: 'other' is not"):
            await client.chat([USER], tools=[tool], tool_choice=Tool("other"))


async def test_an_effort_of_reasoning_reaches_the_template_or_is_refused(
    running: Any, encode: Callable[[str], list[int]]
) -> None:
    running.scheduler.output = encode("Wait.")
    async with pagewire.AsyncClient(running.grpc_target) as client:
        thinking = await client.tokenize([USER])
        await client.chat([USER], reasoning_effort="none")  # this template has a switch for it
        assert running.scheduler.prompt_of(0) != list(thinking)
        with pytest.raises(pagewire.InvalidArgument, match="reasoning_effort: must be one of"):
            await client.chat([USER], reasoning_effort="wild")
