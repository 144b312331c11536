"""The tokens of a GGUF file with their types, and what a kind of tokenizer makes of them."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pagewire.gguf.header import GgufHeader

PREFIX = "tokenizer.ggml."
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


@dataclass(frozen=True, slots=True)
class GgufVocabulary:
    """The text of each id, and its type."""

    header: GgufHeader
    tokens: Sequence[str]
    types: memoryview
    normalized: Collection[int]  # ids of added tokens that are found in the normalized text

    def of_type(self, *types: int) -> list[str]:
        """The tokens of these types, by id."""
        return [token for token, kind in zip(self.tokens, self.types, strict=True) if kind in types]

    def ids(self) -> dict[str, int]:
        """The id of each token that a text can have: unused ones are left out."""
        return {
            token: index
            for index, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True))
            if kind != UNUSED
        }

    def merges(self) -> list[tuple[str, str]]:
        """The pairs that are joined, the first one first, where the file lists them."""
        pairs = []
        for merge in self.header.require(f"{PREFIX}merges", list):
            left, _, right = merge.partition(" ")
            pairs.append((left, right))
        return pairs


@dataclass(frozen=True, slots=True)
class TokenizerKind:
    """A value of `tokenizer.ggml.model`: what is read for it, and what becomes of it."""

    description: str
    token_types: tuple[int, ...]
    keys: frozenset[str]  # that it reads, or that decide nothing for it
    off: tuple[str, ...]  # keys that must be False
    adds_bos: Callable[[GgufHeader], bool]  # unless the file says otherwise. Raises BadGguf
    # Added tokens by id that are found in the normalized text, as it spells them.
    respelled: Callable[[GgufHeader, Sequence[str]], Mapping[int, str]]
    # Normalizer, pre-tokenizer, decoder and model of tokenizer.json. Raises BadGguf.
    parts: Callable[[GgufVocabulary], dict[str, Any]]


def bpe(**settings: Any) -> dict[str, Any]:
    """The model of a tokenizer.json that joins pairs, with its defaults."""
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
    } | settings
