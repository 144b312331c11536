"""A test of texts against grammars."""

from collections.abc import Callable
from typing import Any

import pytest

from gateway.tokens.tokenizer import Tokenizer
from pagewire.v1 import types_pb2
from wire.grammar import new_matcher, read_vocabulary

Accepts = Callable[[str, str], bool]


@pytest.fixture
def accepts(tokenizer: Tokenizer, model_info: Any, encode: Callable[[str], list[int]]) -> Accepts:
    """A function that says whether the grammar of an output allows a text."""
    info = types_pb2.ModelInfo.FromString(model_info.SerializeToString())
    vocabulary = read_vocabulary(tokenizer.definition(), info.vocab_size, info.eos_token_ids)

    def accepts(grammar: str, text: str) -> bool:
        matcher = new_matcher(vocabulary, grammar)
        token_ids = encode(text)
        return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()

    return accepts
