"""A tokenizer for checkpoints of random weights: every id is a word, so every token has text.

With a tokenizer of another vocabulary, ids without text would be sent in no message at all, and a
client would see pauses that no server made.
"""

import json
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import ByteLevel

SPACE = "\u0120"  # how byte-level tokenizers write a space


def write(folder: Path, vocab_size: int) -> None:
    """Writes tokenizer.json and tokenizer_config.json for ids 0 to vocab_size - 1."""
    words = {f"{SPACE}w{index}": index for index in range(vocab_size)}
    tokenizer = Tokenizer(WordLevel(words, unk_token=f"{SPACE}w0"))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=True)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 2**20}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
