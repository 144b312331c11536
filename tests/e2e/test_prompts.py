"""Echo, prompt log probabilities and embeddings, equal to transformers."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch

import pagewire
from tests.e2e.conftest import Product
from tests.e2e.scores import TEXT, Theirs, check_scores, load, long_prompt


@pytest.fixture(scope="module")
def product(tiny_product: Product) -> Product:
    return tiny_product


@pytest.fixture
def client(product: Product) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{product.url}/v1", api_key="any", max_retries=0) as client:
        yield client


@pytest.fixture
def sdk(product: Product) -> Iterator[pagewire.Client]:
    with product.sdk() as client:
        yield client


@pytest.fixture(scope="module")
def theirs(tiny_model: Path) -> Theirs:
    return load(tiny_model)


def test_scores_of_a_prompt_of_two_chunks_are_those_of_transformers(
    sdk: pagewire.Client, theirs: Theirs
) -> None:
    prompt = long_prompt(sdk, 600, seed=1)
    for _ in range(2):  # cached the second time, and computed again
        found = sdk.generate(prompt, prompt_logprobs=3, max_tokens=0)
        check_scores(found, prompt, theirs)
        assert found.usage == pagewire.Usage(600, 0, 0)


def test_an_echo_is_scored_as_transformers_does(
    client: openai.OpenAI, sdk: pagewire.Client, theirs: Theirs
) -> None:
    prompt = list(sdk.tokenize(TEXT))
    echoed = client.completions.create(
        model="", prompt=TEXT, echo=True, logprobs=1, max_tokens=4, temperature=0,
        extra_body={"model": None},
    ).choices[0]  # fmt: skip
    assert echoed.text.startswith(TEXT) and len(echoed.text) > len(TEXT)
    scores = echoed.logprobs
    assert scores is not None and scores.tokens and scores.token_logprobs and scores.top_logprobs
    assert "".join(scores.tokens) == echoed.text
    expected, _ = theirs(prompt)
    chosen = expected[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    assert scores.token_logprobs[0] is None
    assert scores.token_logprobs[1 : len(prompt)] == pytest.approx(chosen.tolist(), abs=1e-4)
    for tops, row in zip(scores.top_logprobs[1:], expected[:-1], strict=False):
        assert max(tops.values()) == pytest.approx(row.max().item(), abs=1e-4)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_embeddings_are_the_hidden_states_of_transformers(
    client: openai.OpenAI, sdk: pagewire.Client, theirs: Theirs, pooling: Any
) -> None:
    prompts = [list(sdk.tokenize(TEXT)), long_prompt(sdk, 560, seed=2), [4093]]
    plain = sdk.embed(prompts, pooling=pooling, normalize=False).vectors
    for vector, prompt in zip(plain, prompts, strict=True):
        _, states = theirs(prompt)
        expected = states[-1] if pooling == "last" else states.mean(0)
        assert vector == pytest.approx(expected.tolist(), abs=1e-3, rel=1e-4)
    extra = {"pooling": pooling, "model": None}
    found = client.embeddings.create(model="", input=TEXT, extra_body=extra)
    length = np.linalg.norm(plain[0])
    assert found.data[0].embedding == pytest.approx((plain[0] / length).tolist(), abs=1e-5)
