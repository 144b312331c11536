"""Embeddings through a real gateway: HTTP and gRPC."""

import base64
import math
from typing import Any

import grpc
import numpy as np
import openai
import pytest

from pagewire.v1 import embedding_pb2, embedding_pb2_grpc, types_pb2
from pagewire.v1 import inference_pb2 as pb
from simulator.workers.prompt_outputs import hidden_of
from tests.gateway.http_calls import post, refusal

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEXT = "The capital of France is Paris."
EMBEDDINGS = "/v1/embeddings"


def vector_of(token_ids: list[int], pooling: str, normalize: bool = True) -> list[float]:
    states = hidden_of(np.array(token_ids), 0).astype(np.float64)
    vector = states[-1] if pooling == "last" else states.mean(0)
    return (vector / np.linalg.norm(vector) if normalize else vector).tolist()


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("normalize", [True, False])
async def test_inputs_of_every_form_become_vectors_in_their_order(
    running: Any, encode: Any, pooling: str, normalize: bool
) -> None:
    how = {"pooling": pooling, "normalize": normalize}
    for inputs, prompts in (
        (TEXT, [encode(TEXT)]),
        ([TEXT, "Hello"], [encode(TEXT), encode("Hello")]),
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5, 6, 7], [8]], [[5, 6, 7], [8]]),
    ):
        answer = await post(running, EMBEDDINGS, {"input": inputs, **how})
        assert (answer["object"], answer["model"]) == ("list", "tiny")
        num_tokens = sum(map(len, prompts))
        assert answer["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        assert [entry["index"] for entry in answer["data"]] == list(range(len(prompts)))
        for entry, prompt in zip(answer["data"], prompts, strict=True):
            expected = vector_of(prompt, pooling, normalize)
            assert entry["object"] == "embedding"
            assert entry["embedding"] == pytest.approx(expected, abs=1e-6)


async def test_a_prompt_is_cut_on_the_side_that_is_named(running: Any, encode: Any) -> None:
    ids = encode(TEXT)
    for side, kept in (("left", ids[-2:]), ("right", ids[:2])):
        await post(
            running,
            EMBEDDINGS,
            {"input": TEXT, "truncate_prompt_tokens": 2, "truncation_side": side},
        )
        assert running.scheduler.prompt_of(-1) == kept


async def test_base64_holds_the_same_numbers_and_the_openai_client_reads_them(
    running: Any, encode: Any
) -> None:
    plain = (await post(running, EMBEDDINGS, {"input": TEXT}))["data"][0]["embedding"]
    body = {"input": TEXT, "encoding_format": "base64"}
    packed = (await post(running, EMBEDDINGS, body))["data"][0]["embedding"]
    assert np.frombuffer(base64.b64decode(packed), "<f4").tolist() == plain
    assert math.hypot(*plain) == pytest.approx(1, abs=1e-6)
    async with openai.AsyncOpenAI(base_url=f"{running.http_url}/v1", api_key="any") as client:
        found = await client.embeddings.create(model="tiny", input=[TEXT, "Hello"])
        assert found.data[0].embedding == pytest.approx(plain, abs=1e-7)
        extra = {"pooling": "mean"}
        mean = await client.embeddings.create(model="tiny", input=TEXT, extra_body=extra)
        assert mean.data[0].embedding == pytest.approx(vector_of(encode(TEXT), "mean"), abs=1e-6)
        with pytest.raises(openai.BadRequestError, match="dimensions"):
            await client.embeddings.create(model="tiny", input=TEXT, dimensions=4)
        whole = await client.embeddings.create(model="tiny", input=TEXT, dimensions=len(plain))
        assert whole.data[0].embedding == found.data[0].embedding


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("input", {"input": []}),
        ("input", {"input": ""}),
        ("input", {"input": 5}),
        ("input[1]", {"input": ["Hello", ""]}),
        ("input[1]", {"input": [[5], [100000]]}),
        ("input[1]", {"input": [[5], [1] * 257]}),
        ("input[0]", {"input": [{"text": "Hello"}]}),
        ("input", {"input": ["Hello"] * 2049}),
        ("pooling", {"pooling": "max"}),
        ("encoding_format", {"encoding_format": "int8"}),
        ("dimensions", {"dimensions": 7}),
        ("embed_dtype", {"embed_dtype": "float16"}),
    ],
)
async def test_an_embedding_that_cannot_be_had_is_refused_by_name(
    running: Any, field: str, fields: dict[str, Any]
) -> None:
    status, param, message = await refusal(running, EMBEDDINGS, {"input": "Hello"} | fields)
    assert (status, param) == (400, field)
    assert message.startswith(f"{field}:")


async def test_an_input_may_fill_the_model(running: Any) -> None:
    prompt = [5] * 256
    answer = await post(running, EMBEDDINGS, {"input": prompt})
    assert answer["data"][0]["embedding"] == pytest.approx(vector_of(prompt, "last"), abs=1e-6)


async def test_a_refusal_of_the_scheduler_ends_the_other_inputs(
    running: Any, eventually: Any
) -> None:
    running.scheduler.refuse(grpc.StatusCode.FAILED_PRECONDITION, "it never fits")
    plain = type(running.scheduler)._answer

    def answer(submit: Any, outbox: Any) -> None:
        if len(running.scheduler.submits) == 3:  # the others hang
            plain(running.scheduler, submit, outbox)

    running.scheduler._answer = answer
    try:
        response = await running.http.post(EMBEDDINGS, json={"input": ["a", "b", "c"]})
        assert response.status_code == 400
        await eventually(lambda: len(running.scheduler.aborted) == 2, "the others are aborted")
    finally:
        del running.scheduler._answer


async def test_grpc_embeds_as_http_does(running: Any, encode: Any) -> None:
    stub = embedding_pb2_grpc.EmbeddingServiceStub(running.channel)
    prompts = [pb.Prompt(text=TEXT), pb.Prompt(token_ids=pb.TokenIds(ids=[5, 6]))]
    request = embedding_pb2.EmbedRequest(
        inputs=prompts, pooling=types_pb2.POOLING_MEAN, request_id="e"
    )
    answer = await stub.Embed(request)
    assert (answer.request_id, answer.model) == ("e", "tiny")
    for found, prompt in zip(answer.embeddings, [encode(TEXT), [5, 6]], strict=True):
        assert list(found.values) == pytest.approx(vector_of(prompt, "mean"), abs=1e-6)
    assert answer.usage.prompt_tokens == len(encode(TEXT)) + 2
    request = embedding_pb2.EmbedRequest(inputs=prompts[:1], normalize=False)
    (found,) = (await stub.Embed(request)).embeddings
    assert list(found.values) == pytest.approx(vector_of(encode(TEXT), "last", False), abs=1e-6)
    for bad, name in (
        (embedding_pb2.EmbedRequest(), "inputs"),
        (embedding_pb2.EmbedRequest(inputs=[pb.Prompt(text="a"), pb.Prompt()]), r"inputs\[1\]"),
        (embedding_pb2.EmbedRequest(inputs=prompts, pooling=7), "pooling"),
    ):
        with pytest.raises(grpc.aio.AioRpcError, match=name) as caught:
            await stub.Embed(bad)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
