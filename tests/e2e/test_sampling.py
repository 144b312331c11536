"""Sampling parameters and log probabilities through all three services, on real language."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
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


def test_named_tokens_have_their_log_probabilities_over_http(product: Product) -> None:
    """The least likely of those that are told otherwise, too."""
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": "Name a city."}],
        "temperature": 0,
        "max_tokens": 6,
        "logprobs": True,
    }
    with httpx.Client(base_url=product.url, timeout=patience(120)) as http:

        def ask(path: str, fields: dict[str, Any]) -> Any:
            answered = http.post(path, json=fields)
            assert answered.status_code == 200, answered.text
            return answered.json()

        likeliest = ask("/v1/chat/completions", body | {"top_logprobs": 20})["choices"][0]
        first = likeliest["logprobs"]["content"][0]["top_logprobs"]
        texts = [entry["token"] for entry in (first[0], first[7], first[19])]
        named = [
            ask("/tokenize", {"prompt": text, "add_special_tokens": False})["tokens"]
            for text in texts
        ]
        assert all(len(ids) == 1 for ids in named)
        ids = [token_id for (token_id,) in named][::-1]
        answer = ask("/v1/chat/completions", body | {"logprob_token_ids": ids})["choices"][0]
    content = answer["logprobs"]["content"]
    assert answer["message"] == likeliest["message"] and len(content) == 6
    told = [(top["token"], top["logprob"]) for top in content[0]["top_logprobs"]]
    expected = [(first[place]["token"], first[place]["logprob"]) for place in (0, 19, 7)]
    assert [token for token, _ in told] == [token for token, _ in expected]
    assert [value for _, value in told] == pytest.approx([value for _, value in expected], abs=1e-4)
    for token in content:  # the token itself, then those that are named
        others = [text for text in texts[::-1] if text != token["token"]]
        assert [top["token"] for top in token["top_logprobs"]] == [token["token"], *others]


def ties(row: torch.Tensor, token_id: int) -> int:
    """Number of other tokens so close that rounding decides the order."""
    return int(((row - row[token_id]).abs() < 1e-4).sum()) - 1


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
