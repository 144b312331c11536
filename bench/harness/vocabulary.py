"""Tokenizers for checkpoints of random weights: every id has text of its own.

Ids without text would be sent in no message, and a client would see pauses that no server made.
"""

import json
from collections.abc import Iterator
from itertools import count, islice, product
from pathlib import Path
from string import ascii_lowercase, digits

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

SPACE = "\u0120"  # how byte-level tokenizers write a space
LETTERS = digits + ascii_lowercase
PUNCTUATION = f'{{}}[]":,.-{SPACE}'  # of JSON; each an id of its own
EOS = "</s>"
# Almost every id spells a part of such a text, so a mask costs what it costs in a long string.
LONG_TEXT = "start: /[0-9a-z]{2000,}/"


def write(folder: Path, vocab_size: int) -> None:
    """Writes tokenizer.json and tokenizer_config.json: every id is a word after a space."""
    words = {f"{SPACE}w{index}": index for index in range(vocab_size)}
    _save(folder, models.WordLevel(words, unk_token=f"{SPACE}w0"), after_space=True)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 2**20}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def write_spelling(folder: Path, vocab_size: int) -> None:
    """Writes a tokenizer.json whose rows can follow grammars: ids spell, and the last one ends."""
    words = {word: index for index, word in enumerate(islice(_spelled(), vocab_size - 1))}
    _save(folder, models.BPE({**words, EOS: vocab_size - 1}, []), eos=EOS)


def _save(folder: Path, model: models.Model, *, after_space: bool = False, eos: str = "") -> None:
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=after_space)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([eos] * bool(eos))
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)


def _spelled() -> Iterator[str]:
    """All words of the letters, shortest first, after the punctuation."""
    yield from PUNCTUATION
    yield from ("".join(word) for size in count(1) for word in product(LETTERS, repeat=size))
