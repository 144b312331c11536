"""Tools and reasoning through the openai package."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import openai
import pytest
import pytest_asyncio

pytestmark = pytest.mark.asyncio(loop_scope="module")

MESSAGES: Any = [{"role": "user", "content": "Weather in Paris?"}]
ARGUMENTS = '{"city": "Paris"}'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'


@pytest_asyncio.fixture(loop_scope="module")
async def client(running: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{running.http_url}/v1", api_key="none", max_retries=0
    ) as client:
        yield client


async def test_a_call_is_asked_for_and_its_result_sent_back(
    client: openai.AsyncOpenAI,
    running: Any,
    encode: Callable[[str], list[int]],
    weather: Any,
) -> None:
    running.scheduler.output = encode(CALL)
    create = client.chat.completions.create
    asked = await create(model="tiny", messages=MESSAGES, tools=[weather], tool_choice="auto")
    assert asked.choices[0].finish_reason == "tool_calls"
    turn = asked.choices[0].message
    assert turn.content is None
    assert turn.tool_calls is not None
    (call,) = turn.tool_calls
    assert call.type == "function"
    assert (call.function.name, call.function.arguments) == ("get_weather", ARGUMENTS)

    running.scheduler.output = encode("Rain.")
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "Rain."}
    history: Any = [*MESSAGES, turn.model_dump(), result]
    answer = await create(model="tiny", messages=history, tools=[weather])
    assert answer.choices[0].message.content == "Rain."
    assert answer.choices[0].message.tool_calls is None


async def test_the_streaming_helper_puts_calls_together(
    client: openai.AsyncOpenAI,
    running: Any,
    encode: Callable[[str], list[int]],
    weather: Any,
) -> None:
    running.scheduler.output = encode(f"Wait.\n{CALL}\n{CALL}")
    chunks = await client.chat.completions.create(
        model="tiny", messages=MESSAGES, tools=[weather], stream=True
    )
    state = openai.lib.streaming.chat.ChatCompletionStreamState()
    async for chunk in chunks:
        state.handle_chunk(chunk)
    (choice,) = state.get_final_completion().choices
    assert (choice.message.content, choice.finish_reason) == ("Wait.", "tool_calls")
    assert choice.message.tool_calls is not None
    assert [call.function.arguments for call in choice.message.tool_calls] == [ARGUMENTS] * 2


async def test_reasoning_comes_beside_the_content(
    client: openai.AsyncOpenAI, running: Any, encode: Callable[[str], list[int]]
) -> None:
    running.scheduler.output = encode("<think>\nHm.\n</think>\n\nHello")
    answer = await client.chat.completions.create(model="tiny", messages=MESSAGES)
    message = answer.choices[0].message
    assert (message.content, message.reasoning_content) == ("Hello", "Hm.")
    again = await client.chat.completions.create(
        model="tiny", messages=[*MESSAGES, message.model_dump(), *MESSAGES]
    )
    assert again.choices[0].message.content == "Hello"


async def test_a_refusal_names_the_place_in_the_tools(
    client: openai.AsyncOpenAI, weather: Any
) -> None:
    weather["function"]["name"] = ""
    with pytest.raises(openai.BadRequestError) as refusal:
        await client.chat.completions.create(model="tiny", messages=MESSAGES, tools=[weather])
    assert refusal.value.param == "tools[0].function.name"
