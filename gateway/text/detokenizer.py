"""Converts token ids to text piece by piece, without incomplete characters.

The pieces of an output joined equal `Tokenizer.decode` of all its ids, however the ids were split.
The cost per token does not grow with the output. Pure; does not handle stop strings.
"""

import codecs
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Protocol

from tokenizers import Tokenizer, pre_tokenizers

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
META_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # sentencepiece's space
_BYTE_PIECE = re.compile("<0x([0-9A-F]{2})>")  # and its single byte
# A UTF-8 character has at most four bytes, so four tokens complete it.
MAX_HELD_TOKENS = 4


class Detokenizer(Protocol):
    """The text of one output, as its tokens arrive."""

    def push(self, token_ids: Iterable[int]) -> str:
        """Adds ids; returns the text that is complete now."""

    def flush(self) -> str:
        """Returns the remaining text, with incomplete characters replaced, after the last token."""


class _ByteTable(dict[int, bytes]):
    """Bytes of byte-level tokens, computed on first use."""

    def __init__(self, tokenizer: Tokenizer, known: Mapping[int, bytes]) -> None:
        super().__init__(known)
        self._tokenizer = tokenizer

    def __missing__(self, token_id: int) -> bytes:
        found = self[token_id] = _byte_level(self._tokenizer.id_to_token(token_id) or "")
        return found


class Vocabulary:
    """Properties of single ids that both forms use; one per tokenizer, shared by all outputs."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        self._byte_tables: dict[frozenset[int], _ByteTable] = {}  # by the hidden ids

    def hidden_ids(
        self, *, skip_special_tokens: bool, shown_tokens: Iterable[str] = ()
    ) -> frozenset[int]:
        """Ids left out of the text: special tokens if skipped, except those in `shown_tokens`."""
        if not skip_special_tokens:
            return frozenset()
        return self._special_ids.difference(map(self._tokenizer.token_to_id, shown_tokens))

    def texts_of(self, token_ids: Iterable[int]) -> dict[str, int]:
        """The ids of some tokens, by their text."""
        return {self._tokenizer.id_to_token(token_id) or "": token_id for token_id in token_ids}

    def has_token(self, token_id: int) -> bool:
        """True if the id has a token; decoding ignores ids without one."""
        return self._tokenizer.id_to_token(token_id) is not None

    def byte_table(self, hidden_ids: frozenset[int]) -> Mapping[int, bytes]:
        """Id to bytes of every byte-level token; empty for hidden ids."""
        found = self._byte_tables.get(hidden_ids)
        if found is None:
            known = dict.fromkeys(hidden_ids, b"")
            found = self._byte_tables[hidden_ids] = _ByteTable(self._tokenizer, known)
        return found

    def spell_piece(self, token_id: int) -> bytes:
        """The bytes of a token that is not a string of byte-level characters."""
        piece: str = self._tokenizer.id_to_token(token_id) or ""
        single = _BYTE_PIECE.fullmatch(piece)
        if single is not None:
            return bytes.fromhex(single[1])
        return piece.replace(META_SPACE, " ").encode()

    def decode(self, token_ids: list[int]) -> str:
        """The text of some ids, special tokens included."""
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=False)
        return text


@lru_cache(maxsize=1)
def _byte_of_char() -> dict[str, int]:
    """GPT-2's byte alphabet: printable bytes are themselves, others map to U+0100 and up."""
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    plain = {char: ord(char) for char in alphabet if ord(char) < 256}
    others = sorted(alphabet - plain.keys())
    missing = sorted(set(range(256)) - set(plain.values()))
    return plain | dict(zip(others, missing, strict=True))


def _byte_level(token: str) -> bytes:
    table = _byte_of_char()
    try:
        return bytes([table[char] for char in token])
    except KeyError:  # an added token, in plain text
        return token.encode()


class ByteLevelDetokenizer:
    """For tokenizers whose every token is a string of bytes, which are decoded as UTF-8."""

    def __init__(self, vocabulary: Vocabulary, hidden_ids: frozenset[int]) -> None:
        self._bytes = vocabulary.byte_table(hidden_ids)
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def push(self, token_ids: Iterable[int]) -> str:
        table = self._bytes
        return self._decode(b"".join([table[token_id] for token_id in token_ids]))

    def flush(self) -> str:
        return self._decode(b"", True)


class WindowDetokenizer:
    """For all other tokenizers: decodes a short window and returns what the new tokens add to it.

    The window holds the last tokens shown, which give the new ones their context (a leading space,
    for example), and the tokens withheld because the text ends in an incomplete character.

    Where single bytes are tokens, `Tokenizer.decode` turns a whole run of them into replacement
    characters if one is invalid, including those shown already. Shown text cannot be withdrawn:
    here only tokens not yet shown are replaced.
    """

    def __init__(self, vocabulary: Vocabulary, hidden_ids: frozenset[int]) -> None:
        self._vocabulary = vocabulary
        self._hidden_ids = hidden_ids
        self._context: list[int] = []
        self._context_text = ""
        self._held: list[int] = []

    def push(self, token_ids: Iterable[int]) -> str:
        # One by one, so that the text does not depend on how the ids were split.
        return "".join([self._push_one(token_id) for token_id in token_ids])

    def _push_one(self, token_id: int) -> str:
        if token_id in self._hidden_ids or not self._vocabulary.has_token(token_id):
            return ""
        self._held.append(token_id)
        text = self._vocabulary.decode(self._context + self._held)
        if text.endswith(REPLACEMENT) and len(self._held) < MAX_HELD_TOKENS:
            return ""
        return self._show(text)

    def _show(self, text: str) -> str:
        held_text = self._vocabulary.decode(self._held)
        shown = self._context_text
        new_text = text[len(shown) :] if text.startswith(shown) else held_text
        self._context, self._context_text, self._held = self._held, held_text, []
        return new_text

    def flush(self) -> str:
        if not self._held:
            return ""
        return self._show(self._vocabulary.decode(self._context + self._held))
