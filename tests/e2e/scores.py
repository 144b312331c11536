"""Prompt log probabilities and hidden states from transformers, to compare with the product's."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import pagewire

TEXT = (
    "The three largest cities of France are Paris, Marseille and Lyon. Each stands on water: the "
    "Seine runs through the capital, Marseille is a port, and in Lyon two rivers meet."
)
Theirs = Callable[[list[int]], tuple[torch.Tensor, torch.Tensor]]


def load(model: Path) -> Theirs:
    """Log probabilities [T, V] and final hidden states [T, hidden] of a prompt."""
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    @torch.inference_mode()
    def run(prompt: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        found = loaded(torch.tensor([prompt]), output_hidden_states=True)
        return found.logits[0].log_softmax(-1), found.hidden_states[-1][0]

    return run


def long_prompt(sdk: pagewire.Client, length: int, seed: int) -> list[int]:
    """The words of TEXT, shuffled and repeated."""
    words = TEXT.split() * (length // 20)
    np.random.default_rng(seed).shuffle(words)
    return list(sdk.tokenize(" ".join(words)))[:length]


def check_scores(found: pagewire.Completion, prompt: list[int], theirs: Theirs) -> None:
    assert list(found.prompt_token_ids) == prompt
    first, *others = found.prompt_logprobs
    expected, _ = theirs(prompt)
    assert first is None and len(others) == len(prompt) - 1
    for token, token_id, row in zip(others, prompt[1:], expected, strict=False):
        assert token is not None
        assert token.logprob == pytest.approx(row[token_id].item(), abs=1e-4)
        ties = int(((row - row[token_id]).abs() < 1e-4).sum()) - 1  # rounding decides their order
        assert abs(token.rank - int((row >= row[token_id]).sum())) <= ties
        tops = [logprob for _, logprob in token.top]
        assert tops == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)
        for top_id, logprob in token.top:
            assert logprob == pytest.approx(row[top_id].item(), abs=1e-4)
