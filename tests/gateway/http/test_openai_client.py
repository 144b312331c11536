"""The gateway with the real OpenAI client."""

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio

pytestmark = pytest.mark.asyncio(loop_scope="module")

MESSAGES: Any = [{"role": "user", "content": "Hello"}]


@pytest_asyncio.fixture(loop_scope="module")
async def client(start: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    running = await start(api_key="s3cret")
    async with openai.AsyncOpenAI(
        base_url=f"{running.http_url}/v1", api_key="s3cret", max_retries=0
    ) as client:
        yield client


async def test_chats_are_answered_whole_and_streamed(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model="tiny", messages=MESSAGES, seed=1)
    assert answer.choices[0].message.content == "Hello world"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 3

    stream = await client.chat.completions.create(
        model="tiny", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == "Hello world"
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens > 0


async def test_completions_are_answered_whole_and_streamed(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model="tiny", prompt=["a", "b"], max_tokens=5)
    assert [choice.text for choice in answer.choices] == ["Hello world"] * 2
    stream = await client.completions.create(
        model="tiny", prompt="a", stream=True, extra_body={"top_k": 5, "min_p": 0.1}
    )
    assert "".join([chunk.choices[0].text async for chunk in stream]) == "Hello world"


async def test_an_answer_can_be_sent_back_as_a_turn(client: openai.AsyncOpenAI) -> None:
    first = await client.chat.completions.create(model="tiny", messages=MESSAGES)
    turn: Any = first.choices[0].message.model_dump()
    again = await client.chat.completions.create(
        model="tiny", messages=[*MESSAGES, turn, *MESSAGES]
    )
    assert again.choices[0].message.content == "Hello world"


async def test_models_are_listed(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == ["tiny"]
    assert (await client.models.retrieve("tiny")).id == "tiny"


async def test_errors_have_the_clients_own_types(client: openai.AsyncOpenAI) -> None:
    create = client.chat.completions.create
    with pytest.raises(openai.BadRequestError) as refusal:
        await create(model="tiny", messages=MESSAGES, web_search_options={})
    named = "web_search_options", "unsupported_parameter"
    assert (refusal.value.param, refusal.value.code) == named
    with pytest.raises(openai.NotFoundError) as missing:
        await create(model="other", messages=MESSAGES)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.AuthenticationError):
        await client.with_options(api_key="wrong").chat.completions.create(
            model="tiny", messages=MESSAGES
        )
