"""Small vocabularies of ranks, as larger files of Mistral and Kimi hold them."""

import base64
import json
from functools import cache
from typing import Any

import tokenizers
from tokenizers import models, pre_tokenizers, trainers

TEXT = (
    "The quick brown fox, 12345 times over; it's 'THE' fox's own fault, isn't it?\n\n"
    "    def f(x):\n\t    return x == y // 2  # aaaa === ----\r\n"
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. Ça va? İstanbul \u017f\n"
    "我能吞下玻璃而不伤身体。こんにちは世界、안녕하세요 세계! 我能吞下玻璃。\n"
    "😀👍🏽👩‍👩‍👧 مرحبا بالعالم हिन्दी में 3.14159e-10 the fox the fox\u2003\u00a0!"
)
WORDS = " ?[^\\s]+|\\s+"


@cache
def ranks() -> dict[bytes, int]:
    """Every byte, and the most frequent joins of a text."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    split = pre_tokenizers.Split(tokenizers.Regex(WORDS), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([TEXT, TEXT[::-1]], trainer)
    plain = {char: ord(char) for char in alphabet if ord(char) < 256}
    others = sorted({*range(256)} - {*plain.values()})
    letters = plain | dict(zip(sorted({*alphabet} - {*plain}), others, strict=True))
    return {
        bytes(letters[char] for char in token): rank
        for token, rank in tokenizer.get_vocab().items()
    }


def tekken(pattern: str, *, num_controls: int = 30, **others: Any) -> dict[str, Any]:
    """A tekken.json of these ranks, which holds more of them than it uses."""
    vocab = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for token, rank in ranks().items()
    ]
    config = {
        "pattern": pattern,
        "num_vocab_tokens": len(vocab),
        "default_vocab_size": len(vocab) - 20 + num_controls,
        "default_num_special_tokens": num_controls,
        "version": "v3",
    }
    return {"config": config, "vocab": vocab, **others}


def tiktoken_model() -> bytes:
    """A tiktoken.model of these ranks."""
    by_rank = sorted(ranks().items(), key=lambda item: item[1])
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in by_rank)


KIMI_CONFIG = {
    "tokenizer_class": "TikTokenTokenizer",
    "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
}


def kimi_config(**controls: int) -> bytes:
    """A tokenizer_config.json of Kimi's, with control tokens."""
    added = {str(number): {"content": f"<|{text}|>"} for text, number in controls.items()}
    return json.dumps(KIMI_CONFIG | {"added_tokens_decoder": added}).encode()
