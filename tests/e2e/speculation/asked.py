"""Questions to products that draft and to those that do not, through the SDK."""

from collections.abc import Mapping
from typing import Any

import pytest

import pagewire
from tests.e2e.conftest import Product

REPEATING = "one two three four five six seven eight nine ten. " * 6


def cases_of(few: tuple[int, ...]) -> dict[str, dict[str, Any]]:
    """Requests by what is special about them; most choose among these few tokens.

    A random model's words have no sense; few of them have outputs repeat themselves.
    """
    return {
        "greedy": {"temperature": 0.0},
        "seeded": {"temperature": 1.0, "top_p": 0.9, "seed": 7},
        "few words": {"temperature": 1.0, "seed": 3, "allowed_token_ids": few},
        "penalties": {
            "temperature": 0.7,
            "seed": 11,
            "presence_penalty": 0.4,
            "frequency_penalty": 0.3,
            "repetition_penalty": 1.1,
            "allowed_token_ids": few,
        },
        "logprobs": {"temperature": 0.0, "logprobs": 3, "allowed_token_ids": few},
        "choices": {"temperature": 1.0, "seed": 5, "n": 2, "allowed_token_ids": few},
        "stop token": {
            "temperature": 1.0,
            "seed": 13,
            "allowed_token_ids": few,
            "stop_token_ids": (few[0],),
            "min_tokens": 9,
            "ignore_eos": False,
        },
        "bias": {
            "temperature": 1.0,
            "seed": 17,
            "allowed_token_ids": few,
            "logit_bias": {few[1]: 1.5},
        },
        "grammar": {
            "temperature": 1.0,
            "seed": 19,
            "structured_output": pagewire.Regex("[a-f]{9}( [a-f]{3}){4}"),
            "ignore_eos": False,
        },
    }


def ask(
    client: pagewire.Client, prompt: str, num_tokens: int, case: Mapping[str, Any]
) -> pagewire.Completion:
    """The answer to one case, after so many tokens unless the case says otherwise."""
    return client.generate(prompt, **{"max_tokens": num_tokens, "ignore_eos": True, **case})


def check_same(found: pagewire.Completion, expected: pagewire.Completion) -> None:
    """Tokens, texts and ends of all choices, and the first one's log-probabilities."""
    told, wanted = (
        [
            (choice.token_ids, choice.text, choice.finish_reason, choice.stop_reason)
            for choice in (answer, *answer.more)
        ]
        for answer in (found, expected)
    )
    assert told == wanted
    assert [top.logprob for top in found.logprobs] == pytest.approx(
        [top.logprob for top in expected.logprobs], abs=1e-3
    )


def count_of(product: Product, name: str) -> int:
    """A count of the scheduler's status."""
    return int(product.status().get(name, 0))
