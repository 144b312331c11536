"""The largest call there may be: all its outputs come, in order, and others have their turn."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from gateway.errors.limits import MAX_PROMPTS
from tests.e2e.conftest import Product

pytestmark = pytest.mark.slow


def complete(product: Product, **fields: Any) -> httpx.Response:
    body = {"max_tokens": 1, "temperature": 0, **fields}
    return product.post("/v1/completions", body)


def test_a_call_far_above_the_queue_comes_whole_and_another_caller_has_its_turn(
    tiny_product: Product,
) -> None:
    prompts = [f"{number} times" for number in range(MAX_PROMPTS)]
    before = int(tiny_product.status().get("num_finished", 0))
    with ThreadPoolExecutor(1) as pool:
        largest = pool.submit(complete, tiny_product, prompt=prompts, echo=True)
        while int(tiny_product.status().get("num_finished", 0)) == before:  # it has begun
            assert not largest.done()
        other = complete(tiny_product, prompt="Hello")
        assert not largest.done(), "the other caller has waited for all of the largest call"
        assert other.status_code == 200, other.text
        choices = largest.result().json()["choices"]
    assert [choice["index"] for choice in choices] == list(range(MAX_PROMPTS))
    for prompt, choice in zip(prompts, choices, strict=True):
        assert choice["text"].startswith(prompt)
