"""A tokenizer for random checkpoints, so that their rows can follow grammars."""

from collections.abc import Iterator
from itertools import count, islice, product
from pathlib import Path
from string import ascii_lowercase, digits

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

LETTERS = digits + ascii_lowercase
PUNCTUATION = '{}[]":,.- '  # of JSON; each an id of its own
EOS = "</s>"
# Almost every id spells a part of such a text, so a mask costs what it costs in a long string.
LONG_TEXT = "start: /[0-9a-z]{2000,}/"


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Writes a tokenizer.json: each id spells text of its own, the last id ends."""
    vocabulary = {word: index for index, word in enumerate(islice(_words(), vocab_size - 1))}
    tokenizer = tokenizers.Tokenizer(models.BPE({**vocabulary, EOS: vocab_size - 1}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([EOS])
    tokenizer.save(str(folder / "tokenizer.json"))


def _words() -> Iterator[str]:
    """All words of the letters, shortest first, after the punctuation."""
    yield from PUNCTUATION.replace(" ", "\u0120")  # how byte-level tokenizers write a space
    yield from ("".join(word) for size in count(1) for word in product(LETTERS, repeat=size))
