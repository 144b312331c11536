"""Seeds through all three services: alone, among others, and in several choices."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import openai
import pytest

from pagewire.v1 import inference_pb2_grpc, types_pb2
from tests.e2e.conftest import Product
from tests.e2e.test_sampling import PROMPT, Stub, generate


@pytest.fixture
def stub(tiny_product: Product) -> Iterator[Stub]:
    with grpc.insecure_channel(f"127.0.0.1:{tiny_product.grpc_port}") as channel:
        yield inference_pb2_grpc.InferenceServiceStub(channel)


@pytest.fixture
def client(tiny_product: Product) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{tiny_product.url}/v1", api_key="any", max_retries=0) as client:
        yield client


def test_a_seed_gives_the_same_tokens_alone_and_among_31_others(stub: Stub) -> None:
    sampling = types_pb2.SamplingParams(
        temperature=1, seed=7, max_tokens=16, ignore_eos=True, frequency_penalty=0.3
    )
    alone = list(generate(stub, sampling).token_ids)

    def other(index: int) -> None:
        filters = {"top_p": 0.8} if index % 2 else {"top_k": 20}
        params = types_pb2.SamplingParams(
            temperature=0.5 + index / 30,
            seed=index,
            max_tokens=24,
            ignore_eos=True,
            presence_penalty=index / 20,
            logprobs=index % 3,
            **filters,
        )
        generate(stub, params, prompt=f"{index} bottles of")

    with ThreadPoolExecutor(32) as pool:
        others = [pool.submit(other, index) for index in range(31)]
        together = list(pool.submit(generate, stub, sampling).result().token_ids)
        for future in others:
            future.result()
    assert together == alone


def test_n_choices_differ_and_come_back_with_their_seed(client: openai.OpenAI) -> None:
    name = client.models.list().data[0].id

    def ask(n: int) -> openai.types.Completion:
        return client.completions.create(
            model=name, prompt=PROMPT, n=n, seed=3, temperature=1, max_tokens=12, logprobs=2
        )

    four, again, one = ask(4), ask(4), ask(1)
    texts = [choice.text for choice in four.choices]
    assert [choice.index for choice in four.choices] == [0, 1, 2, 3]
    assert len(set(texts)) == 4
    assert texts == [choice.text for choice in again.choices]
    assert texts[0] == one.choices[0].text
    assert four.usage is not None and one.usage is not None
    assert four.usage.prompt_tokens == one.usage.prompt_tokens
    for choice in four.choices:
        assert choice.logprobs is not None and choice.logprobs.tokens is not None
        assert "".join(choice.logprobs.tokens) == choice.text
        assert choice.logprobs.top_logprobs is not None
        assert all(2 <= len(tops) <= 3 for tops in choice.logprobs.top_logprobs)
