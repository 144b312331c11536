"""Sampling parameters and log probabilities through all three services."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import openai
import pytest
import torch
from transformers import AutoModelForCausalLM

from pagewire.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from tests.e2e.conftest import Product
from tests.pace import patience

PROMPT = "The three largest cities of France are"
Stub = inference_pb2_grpc.InferenceServiceStub


@pytest.fixture
def stub(product: Product) -> Iterator[Stub]:
    with grpc.insecure_channel(f"127.0.0.1:{product.grpc_port}") as channel:
        yield inference_pb2_grpc.InferenceServiceStub(channel)


@pytest.fixture
def tiny_client(tiny_product: Product) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{tiny_product.url}/v1", api_key="any", max_retries=0) as client:
        yield client


@pytest.fixture
def tiny_stub(tiny_product: Product) -> Iterator[Stub]:
    with grpc.insecure_channel(f"127.0.0.1:{tiny_product.grpc_port}") as channel:
        yield inference_pb2_grpc.InferenceServiceStub(channel)


def generate(
    stub: Stub, sampling: types_pb2.SamplingParams, prompt: str = PROMPT, **options: object
) -> inference_pb2.Output:
    request = inference_pb2.GenerateRequest(
        prompt=inference_pb2.Prompt(text=prompt),
        options=inference_pb2.GenerationOptions(sampling=sampling, **options),
    )
    return stub.Generate(request, timeout=patience(120)).output


@torch.inference_mode()
def test_logprobs_and_ranks_are_those_of_transformers(
    product: Product, stub: Stub, model: Path
) -> None:
    sampling = types_pb2.SamplingParams(
        temperature=1.3, seed=1, max_tokens=24, logprobs=5, presence_penalty=1, ignore_eos=True
    )
    output = generate(stub, sampling)
    tokenized = inference_pb2.TokenizeRequest(text=PROMPT)
    prompt = list(stub.Tokenize(tokenized, timeout=patience(30)).token_ids)
    theirs = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    token_ids = prompt + list(output.token_ids)
    expected = theirs(torch.tensor([token_ids])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    assert len(output.logprobs) == 24
    assert max(token.rank for token in output.logprobs) > 3  # not only the likeliest
    for token, token_id, row in zip(output.logprobs, output.token_ids, expected, strict=True):
        assert token.logprob == pytest.approx(row[token_id].item(), abs=1e-4)
        assert abs(token.rank - int((row >= row[token_id]).sum())) <= ties(row, token_id)
        assert list(token.top_logprobs) == pytest.approx(row.topk(5).values.tolist(), abs=1e-4)
        for top_id, logprob in zip(token.top_token_ids, token.top_logprobs, strict=True):
            assert logprob == pytest.approx(row[top_id].item(), abs=1e-4)


def ties(row: torch.Tensor, token_id: int) -> int:
    """Number of other tokens so close that rounding decides the order."""
    return int(((row - row[token_id]).abs() < 1e-4).sum()) - 1


def test_a_seed_gives_the_same_tokens_alone_and_among_31_others(tiny_stub: Stub) -> None:
    sampling = types_pb2.SamplingParams(
        temperature=1, seed=7, max_tokens=16, ignore_eos=True, frequency_penalty=0.3
    )
    alone = list(generate(tiny_stub, sampling).token_ids)

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
        generate(tiny_stub, params, prompt=f"{index} bottles of")

    with ThreadPoolExecutor(32) as pool:
        others = [pool.submit(other, index) for index in range(31)]
        together = list(pool.submit(generate, tiny_stub, sampling).result().token_ids)
        for future in others:
            future.result()
    assert together == alone


def test_rules_hold_in_the_text(stub: Stub, product: Product) -> None:
    greedy = types_pb2.SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    free = generate(stub, greedy)
    assert "Paris" in free.text
    assert "Paris" not in generate(stub, greedy, bad_words=["Paris"]).text
    (forced,) = set(free.token_ids[:1])
    greedy.logit_bias.add(token_id=forced, bias=100)
    assert set(generate(stub, greedy).token_ids) == {forced}
    few = sorted(set(free.token_ids))[:3]
    allowed = types_pb2.SamplingParams(
        temperature=2, seed=1, max_tokens=32, ignore_eos=True, allowed_token_ids=few
    )
    assert set(generate(stub, allowed).token_ids) == set(few)
    repeating = generate(stub, types_pb2.SamplingParams(temperature=0, max_tokens=64))
    penalized = types_pb2.SamplingParams(temperature=0, max_tokens=64, frequency_penalty=1.5)
    fewer = generate(stub, penalized)
    assert most_frequent(fewer.token_ids) < most_frequent(repeating.token_ids)


def most_frequent(token_ids: object) -> float:
    """Frequency of the most frequent token, 0 to 1."""
    ids = list(token_ids)  # type: ignore[call-overload]
    return max(map(ids.count, ids)) / len(ids)


def test_n_choices_differ_and_come_back_with_their_seed(tiny_client: openai.OpenAI) -> None:
    name = tiny_client.models.list().data[0].id

    def ask(n: int) -> openai.types.Completion:
        return tiny_client.completions.create(
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
