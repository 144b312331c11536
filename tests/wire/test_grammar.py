"""Grammars by llguidance: what a matcher allows is what it then takes."""

import random

import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelText
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from wire.grammar import BadGrammar, Matcher, Vocabulary, new_matcher, read_vocabulary

SPECIAL = "<|im_start|>"


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    alphabet = {char: number for number, char in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer = Tokenizer(BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelText()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in (SPECIAL, "<end>")])
    size = tokenizer.get_vocab_size()
    return read_vocabulary(tokenizer.to_str(), size, [tokenizer.token_to_id("<end>")])


@pytest.mark.parametrize(
    "grammar",
    [
        f'start: "{SPECIAL * 3}" | "no"',
        f'start: "x" "{SPECIAL[:4]}" "{SPECIAL[4:]}!"',
        f'start: %json {{"const": "{SPECIAL}"}}',
        Matcher.grammar_from_json_schema(f'{{"const": "{SPECIAL * 2}"}}'),
        Matcher.grammar_from_regex(f"no|{SPECIAL}".replace("<|", r"<\|").replace("|>", r"\|>")),
        f"%llguidance {{}}\nstart: /{SPECIAL.replace('|', chr(92) + '|')}/",
    ],
)
def test_text_that_spells_a_special_token_stays_text(vocabulary: Vocabulary, grammar: str) -> None:
    """Found by the fuzzer, seed 42: the special token was the only one allowed, and refused."""
    for seed in range(20):
        rng, matcher, text = random.Random(seed), new_matcher(vocabulary, grammar), b""
        while not matcher.is_stopped():
            allowed = int.from_bytes(matcher.compute_bitmask(), "little")
            ids = [n for n in range(vocabulary.vocab_size) if allowed >> n & 1]
            matcher.consume_token(token := rng.choice(ids))
            assert not matcher.is_error(), matcher.get_error()
            text += vocabulary.decode_bytes([token])
        assert SPECIAL.encode() in text or text.startswith(b"no")


@pytest.mark.parametrize("text", ["{", "{}", '{"grammars": []}', '{"grammars": [7]}', "[" * 9000])
def test_what_is_no_grammar_is_refused(vocabulary: Vocabulary, text: str) -> None:
    with pytest.raises(BadGrammar):
        new_matcher(vocabulary, text)
