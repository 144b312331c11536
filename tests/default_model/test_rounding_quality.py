"""Weights and inputs rounded to integers, and the default model: how far its predictions move."""

import pytest
import torch
from tokenizers import Tokenizer

from bench.compare.kv_cache_dtype import TEXT
from bench.compare.rounding import measure
from default_model.folder import ensure

pytestmark = pytest.mark.slow


def test_perplexity_and_best_tokens_stay_near_those_of_the_model_as_it_is() -> None:
    tokenizer = Tokenizer.from_file(str(ensure() / "tokenizer.json"))
    token_ids = tokenizer.encode(TEXT.read_text("utf-8")).ids
    own, *others = measure(ensure(), token_ids, torch.float32)
    assert own.agreement == 1
    assert [one.quantization for one in others] == ["int8", "int4"]
    for one in others:
        assert abs(one.perplexity / own.perplexity - 1) < 0.02
        assert 0.93 < one.agreement < 1
