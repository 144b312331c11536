"""The asyncio client, where it differs from the blocking one."""

import asyncio
import gc

import pytest

import pagewire
from tests.pace import patience


@pytest.fixture
async def client(gateway):
    async with pagewire.AsyncClient(gateway.target, timeout_s=patience(20)) as client:
        yield client


async def wait_for(event):
    assert await asyncio.to_thread(event.wait, 5)


async def test_every_call_is_awaited(client):
    assert (await client.generate("Q")).text == "Q:The capital is Paris."
    assert (await client.chat("Q", max_tokens=1)).text == "Q:The"
    assert await client.tokenize("hello") == tuple(b"hello")
    assert await client.detokenize(b"hello") == "hello"
    assert (await client.embed(["a", "b"])).vectors == ((0.0, 0.5), (1.0, 0.5))
    assert [model.name for model in await client.models()] == ["tiny"]
    assert await client.wait_until_ready(timeout_s=patience(5))


async def test_streams_bring_pieces_and_then_the_whole(client):
    stream = client.stream("Q")
    assert [delta.text async for delta in stream] == ["The", " capital", " is", " Paris", "."]
    assert (await stream.completion()).text == "The capital is Paris."
    assert (await client.stream_chat("Q", max_tokens=2).completion()).token_ids == (3, 8)


@pytest.mark.parametrize("leave", ["close", "with", "drop", "cancel task"])
async def test_leaving_a_stream_early_cancels_it_on_the_server(client, gateway, leave):
    stream = client.stream("endless")
    assert (await anext(stream)).text == "on "
    if leave == "close":
        stream.close()
        with pytest.raises(pagewire.Cancelled):
            await stream.completion()
    elif leave == "with":
        async with stream:
            pass
    elif leave == "drop":
        del stream
        gc.collect()
    else:
        reading = asyncio.create_task(stream.completion())
        await asyncio.sleep(0.05)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
    await wait_for(gateway.cancelled)


async def test_errors_and_deadlines_are_those_of_the_blocking_client(client):
    with pytest.raises(pagewire.NotFound):
        await client.generate("fail NOT_FOUND")
    with pytest.raises(pagewire.Overloaded) as caught:
        await client.stream("overload", timeout_s=2.0).completion()  # less than the advice
    assert caught.value.retry_after_s == 2.5
    with pytest.raises(pagewire.DeadlineExceeded):
        await client.generate("hang", timeout_s=0.2)
    with pytest.raises(pagewire.Internal, match="finish reason"):
        await client.stream("broken").completion()


async def test_batch_keeps_the_order_and_the_bound(client, gateway):
    prompts = ["wait" if index % 3 else f"{index}" for index in range(30)]
    completions = await client.batch(prompts, max_concurrency=4, max_tokens=1)
    assert [completion.text for completion in completions] == [f"{p}:The" for p in prompts]
    assert 2 <= gateway.max_live <= 4


async def test_a_failure_in_a_batch_cancels_the_rest(client, gateway):
    prompts = ["hang", "hang", "fail NOT_FOUND", *["never"] * 50]
    async with asyncio.timeout(patience(5)):
        with pytest.raises(pagewire.NotFound):
            await client.batch(prompts, max_concurrency=3)
    await wait_for(gateway.cancelled)
    assert gateway.num_calls["Generate"] < 10


def test_a_client_may_be_made_before_its_loop(gateway):
    client = pagewire.AsyncClient(gateway.target)

    async def ask() -> str:
        async with client:
            return (await client.generate("Q")).text

    assert asyncio.run(ask()) == "Q:The capital is Paris."
