"""Words that an output may not hold, as token ids."""

from collections.abc import Sequence
from dataclasses import replace

from gateway.errors import limits
from gateway.request.generation import SamplingParams
from gateway.tokens.tokenizer import Tokenizer


async def with_bad_words(
    tokenizer: Tokenizer, sampling: SamplingParams, words: Sequence[str]
) -> SamplingParams:
    """The sampling with some words as token ids. Raises RequestError.

    A word has other tokens after a space than at the start of a text: both are forbidden.
    """
    if not words:
        return sampling
    sequences = dict.fromkeys(sampling.bad_words_token_ids)
    texts = [text for word in words for text in (word.lstrip(), f" {word.lstrip()}")]
    for index, token_ids in enumerate(await tokenizer.encode_all("bad_words", texts)):
        limits.check_count(f"bad_words[{index // 2}]", len(token_ids), limits.MAX_BAD_WORD_TOKENS)
        if token_ids:
            sequences[tuple(token_ids)] = None
    return replace(sampling, bad_words_token_ids=tuple(sequences))
