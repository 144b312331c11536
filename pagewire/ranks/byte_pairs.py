"""tokenizer.json of a vocabulary whose tokens have ranks and no merges. Pure.

Such a tokenizer joins the neighbours whose token has the lowest rank, the first of equal ones, and
takes a piece of text that is a token as it is. One merge for each token says the same: of all pairs
that make a token, text leaves only that one next to each other which its own bytes leave when they
are joined alone. docs/decisions/0045 has why.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
DECODER = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}


class BadRanks(ValueError):
    """A tokenizer's file is damaged or not supported; the message names the file and the field."""


@dataclass(frozen=True, slots=True)
class ControlToken:
    """A token that no text is joined to."""

    id: int
    text: str
    is_special: bool = True  # whether it is left out of texts that are shown


@dataclass(frozen=True, slots=True)
class RankedVocabulary:
    """A vocabulary of byte strings by rank, and what else its tokenizer needs."""

    ranks: Mapping[bytes, int]
    first_id: int  # of the token with rank 0
    pattern: str  # by which a text is cut before its pieces are joined
    controls: tuple[ControlToken, ...]
    begins_with: str | None = None  # the control token before each text

    def definition(self) -> dict[str, Any]:
        """The content of tokenizer.json."""
        return {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [_added(control) for control in self.controls],
            "normalizer": None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [_cut_by(self.pattern), BYTES]},
            "post_processor": self._post_processor(),
            "decoder": DECODER,
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": True,
                "vocab": self._vocabulary(),
                "merges": self._merges(),
            },
        }

    def _vocabulary(self) -> dict[str, int]:
        ids = {control.text: control.id for control in self.controls}
        for token, rank in self.ranks.items():
            text = _spelled(token)
            if text in ids:
                raise BadRanks(f"the token of rank {rank} has the text of the control {text!r}")
            ids[text] = self.first_id + rank
        return dict(sorted(ids.items(), key=lambda item: item[1]))

    def _merges(self) -> list[list[str]]:
        merges = []
        for token in sorted(self.ranks, key=self.ranks.__getitem__):
            pair = _pair_of(token, self.ranks)
            if pair is not None:
                merges.append([_spelled(pair[0]), _spelled(pair[1])])
        return merges

    def _post_processor(self) -> dict[str, Any] | None:
        if self.begins_with is None:
            return None
        (begin,) = [one for one in self.controls if one.text == self.begins_with]
        first = {"SpecialToken": {"id": begin.text, "type_id": 0}}
        text, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
        used = {begin.text: {"id": begin.text, "ids": [begin.id], "tokens": [begin.text]}}
        return {
            "type": "TemplateProcessing",
            "single": [first, text],
            "pair": [first, text, first, second],
            "special_tokens": used,
        }


def _pair_of(token: bytes, ranks: Mapping[bytes, int]) -> tuple[bytes, bytes] | None:
    """The two tokens that a token is joined of; None for a byte, and for one that never is."""
    splits = [
        (token[:at], token[at:])
        for at in range(1, len(token))
        if token[:at] in ranks and token[at:] in ranks
    ]
    if len(splits) < 2:
        return splits[0] if splits else None
    return _joined(token, ranks)


def _joined(token: bytes, ranks: Mapping[bytes, int]) -> tuple[bytes, bytes] | None:
    """Joins a token's bytes by ranks below its own; returns the two tokens left, if two are."""
    most = ranks[token]
    parts = [token[at : at + 1] for at in range(len(token))]
    found = [ranks.get(parts[at] + parts[at + 1], most) for at in range(len(parts) - 1)]
    while len(parts) > 2:
        lowest = min(found)
        if lowest >= most:
            return None
        at = found.index(lowest)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
        del found[at]
        if at > 0:
            found[at - 1] = ranks.get(parts[at - 1] + parts[at], most)
        if at < len(found):
            found[at] = ranks.get(parts[at] + parts[at + 1], most)
    return parts[0], parts[1]


def _letters() -> list[str]:
    """The character that stands for each byte, as in every byte-level tokenizer.

    Visible characters of Latin-1 stand for themselves, the others are counted from U+0100 on.
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    letters, num_others = [], 0
    for byte in range(256):
        if byte in visible:
            letters.append(chr(byte))
        else:
            letters.append(chr(0x100 + num_others))
            num_others += 1
    return letters


_TABLE = dict(enumerate(_letters()))


def _spelled(token: bytes) -> str:
    return token.decode("latin-1").translate(_TABLE)


def _cut_by(pattern: str) -> dict[str, Any]:
    return {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }


def _added(control: ControlToken) -> dict[str, Any]:
    return {
        "id": control.id,
        "content": control.text,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": control.is_special,
    }
