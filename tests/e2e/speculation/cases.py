"""Requests whose outputs drafts must not change, and the model that answers them."""

from pathlib import Path
from typing import Any

import numpy as np
from transformers import LlamaConfig, LlamaForCausalLM

from tests.e2e.speculation.joined import EOS, VOCAB_SIZE, Joined, Told
from tests.worker_svc.random_models import save_random_model

FEW = (20, 21, 22, 23)
REPEATING = [10, 11, 12, 13, 14, 15, 16, 17] * 4
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "greedy among few": {"temperature": 0.0, "allowed_token_ids": FEW},
    "seeded": {"temperature": 1.0, "top_p": 0.9, "seed": 7},
    "few": {"temperature": 1.0, "top_p": 0.95, "seed": 3, "allowed_token_ids": FEW},
    "penalties": {
        "temperature": 0.7,
        "seed": 11,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.1,
        "allowed_token_ids": FEW,
    },
    "logprobs": {"temperature": 0.5, "seed": 2, "logprobs": 3, "allowed_token_ids": FEW},
    "stop after a minimum": {
        "temperature": 1.0,
        "seed": 13,
        "allowed_token_ids": FEW,
        "stop_token_ids": (FEW[0],),
        "min_tokens": 9,
    },
    "eos": {"temperature": 1.0, "seed": 5, "allowed_token_ids": (EOS, *FEW), "min_tokens": 6},
}


MODEL = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "eos_token_id": EOS,
}


def save_model(where: Path, **changes: object) -> Path:
    """A small random model in this folder, which is returned."""
    save_random_model(where, (LlamaConfig, LlamaForCausalLM), {**MODEL, **changes})
    return where


def add_all(joined: Joined) -> None:
    for fields in CASES.values():
        joined.add(REPEATING, **fields)
    for seed in (1, 2):  # as n = 2 of one request
        sampled = {"temperature": 1.0, "seed": seed, "allowed_token_ids": FEW}
        joined.add(REPEATING[:21], "choices", **sampled)
    joined.add(list(range(3, 120)), temperature=0.0, allowed_token_ids=FEW)  # in two chunks


def check(found: dict[int, Told], expected: dict[int, Told]) -> None:
    for handle, told in expected.items():
        assert found[handle].token_ids == told.token_ids, handle
        assert found[handle].reason == told.reason
        np.testing.assert_allclose(found[handle].logprobs, told.logprobs, atol=1e-3)
