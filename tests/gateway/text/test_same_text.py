"""Streamed text equals unstreamed text equals the tokenizer's decoding, stop strings included.

Hundreds of random outputs run through the whole gateway, over both APIs.
"""

import asyncio
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from gateway.tokens.tokenizer import Tokenizer
from pagewire.v1 import inference_pb2 as pb
from pagewire.v1 import scheduler_pb2
from pagewire.v1.inference_pb2_grpc import InferenceServiceStub
from wire import columns

pytestmark = pytest.mark.asyncio(loop_scope="module")

NUM_OUTPUTS = 300
NUM_PER_CALL = 50
MAX_TOKENS = 40
Ids = list[int]


@pytest.fixture(scope="module")
def outputs(tokenizer: Tokenizer, encode: Callable[[str], Ids]) -> list[Ids]:
    """Random outputs.

    Half are random ids: incomplete characters, special tokens, ids without a token. Half are
    characters of up to four bytes, with a few tokens removed.
    """
    chance = random.Random(7)

    def anything() -> Ids:
        return chance.choices(range(tokenizer.vocab_size + 10), k=chance.randint(1, MAX_TOKENS))

    def characters() -> Ids:
        text = "".join(chance.choices("ab \n.éß中日😀👩‍👧🎉\u0301\u200d", k=chance.randint(1, 12)))
        kept = [token_id for token_id in encode(text) if chance.random() > 0.05]
        return kept[:MAX_TOKENS] or [0]

    return [anything() if index % 2 else characters() for index in range(NUM_OUTPUTS)]


@pytest.fixture(autouse=True)
def answers(running: Any, outputs: list[Ids]) -> Iterator[None]:
    """Scripts the scheduler: prompt [index // 100, index % 100] gets that output in pieces."""
    chance = random.Random(8)

    def answer(submit: Any, outbox: Any) -> None:
        high, low = columns.unpack(submit.prompt_token_ids).tolist()
        rest = running.scheduler.output = outputs[high * 100 + low]
        while rest:
            count = chance.randint(1, 4)
            ids, rest = rest[:count], rest[count:]
            handles = columns.pack([submit.handle] * len(ids), columns.UINT32)
            outbox.put_nowait(
                scheduler_pb2.SessionResponse(handles=handles, token_ids=columns.pack(ids))
            )
        running.scheduler._finish(submit, outbox)

    running.scheduler._answer = answer
    yield
    del running.scheduler._answer


def prompt_of(index: int) -> Ids:
    return [index // 100, index % 100]


def cut(text: str, stops: list[str], include: bool) -> str:
    """The text up to the stop string that ends first, the longest if several end there."""
    ends = [(text.find(stop) + len(stop), -len(stop)) for stop in stops if stop in text]
    if not ends:
        return text
    end, minus_length = min(ends)
    return text[:end] if include else text[: end + minus_length]


def some_stops(chance: random.Random, texts: list[str]) -> list[str]:
    """Strings that occur in many of the texts."""
    stops = []
    for _ in range(chance.randint(0, 3)):
        text = chance.choice(texts) or "x"
        start = chance.randrange(len(text))
        stops.append(text[start : start + chance.randint(1, 3)])
    return stops


async def streamed(running: Any, body: dict[str, Any]) -> list[str]:
    texts = [""] * NUM_PER_CALL
    body = body | {"stream": True}
    async with running.http.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line and line != "data: [DONE]":
                (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                texts[choice["index"]] += choice["text"]
    return texts


async def unstreamed(running: Any, body: dict[str, Any]) -> list[str]:
    response = await running.http.post("/v1/completions", json=body)
    return [choice["text"] for choice in response.json()["choices"]]


async def test_streamed_and_unstreamed_text_is_what_the_tokenizer_decodes(
    running: Any, outputs: list[Ids], tokenizer: Tokenizer
) -> None:
    chance = random.Random(9)
    num_cut = 0
    for start in range(0, NUM_OUTPUTS, NUM_PER_CALL):
        indexes = range(start, start + NUM_PER_CALL)
        skip = chance.random() < 0.5
        whole = [tokenizer.decode(outputs[i], skip_special_tokens=skip) for i in indexes]
        stops, include = some_stops(chance, whole), chance.random() < 0.5
        expected = [cut(text, stops, include) for text in whole]
        num_cut += sum(text != before for text, before in zip(expected, whole, strict=True))
        body = {
            "prompt": [prompt_of(index) for index in indexes],
            "stop": stops,
            "include_stop_str_in_output": include,
            "skip_special_tokens": skip,
        }
        assert await unstreamed(running, body) == expected
        assert await streamed(running, body) == expected
    assert num_cut > NUM_OUTPUTS / 20


async def test_grpc_gives_the_same_texts(
    running: Any, outputs: list[Ids], tokenizer: Tokenizer
) -> None:
    stub = InferenceServiceStub(running.channel)

    async def read(index: int) -> None:
        prompt = pb.Prompt(token_ids=pb.TokenIds(ids=prompt_of(index)))
        expected = tokenizer.decode(outputs[index], skip_special_tokens=True)
        whole = await stub.Generate(pb.GenerateRequest(prompt=prompt))
        assert whole.output.text == expected
        assert list(whole.output.token_ids) == outputs[index]
        call = stub.GenerateStream(pb.GenerateStreamRequest(prompt=prompt))
        deltas = [response.delta async for response in call]
        assert "".join(delta.text for delta in deltas) == expected
        assert [i for delta in deltas for i in delta.token_ids] == outputs[index]

    for start in range(0, NUM_OUTPUTS, NUM_PER_CALL):
        await asyncio.gather(*map(read, range(start, start + NUM_PER_CALL)))
