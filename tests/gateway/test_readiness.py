"""A tokenizer is the model's or it is not."""

from typing import Any

from gateway.convert import model_from_proto
from gateway.readiness import mismatch


def test_ids_beyond_the_models_vocabulary_are_a_mismatch(tokenizer: Any, model_info: Any) -> None:
    assert mismatch(tokenizer, model_from_proto(model_info, None)) is None
    model_info.tokenizer_sha256 = ""
    model_info.vocab_size = tokenizer.vocab_size
    assert mismatch(tokenizer, model_from_proto(model_info, None)) is None
    model_info.vocab_size = tokenizer.vocab_size - 1
    problem = mismatch(tokenizer, model_from_proto(model_info, None))
    assert problem is not None and str(tokenizer.vocab_size - 1) in problem
