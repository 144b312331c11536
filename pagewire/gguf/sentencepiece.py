"""SentencePiece's BPE, which GGUF calls `llama`, in the form that `tokenizers` computes.

A text is one piece, in which \u2581 stands for a space. Of all neighbours those are joined first
whose joined token has the best score, and a character that is no token becomes its bytes. The file
holds scores and the library reads a list of pairs: their order is the same if no scores are equal.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from pagewire.gguf.header import GgufHeader
from pagewire.gguf.vocabulary import (
    BYTE,
    CONTROL,
    NORMAL,
    PREFIX,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    GgufVocabulary,
    TokenizerKind,
    bpe,
)

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
BYTES = frozenset(f"<0x{byte:02X}>" for byte in range(256))
# Each is cut at all its places, which takes the square of this for a token.
MAX_CHARACTERS = 1024
PRE = "default"  # what converters write where no pre-tokenizer is
PREPEND = {"type": "Prepend", "prepend": SPACE}
REPLACE: dict[str, Any] = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
DECODERS = (
    {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
)


def pairs_by_score(scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """All pairs of tokens that join to a token, that of the best score first.

    Of those that join to the same token the one with the longest left part comes first. Takes at
    most two look-ups for each character of the tokens.
    """
    best_first = sorted(scores, key=scores.__getitem__, reverse=True)
    return [pair for token in best_first for pair in _cuts(token, scores)]


def _cuts(token: str, known: Collection[str]) -> Iterator[tuple[str, str]]:
    for cut in range(len(token) - 1, 0, -1):
        if token[:cut] in known and token[cut:] in known:
            yield token[:cut], token[cut:]


def _adds_bos(header: GgufHeader) -> bool:
    return True


def _adds_space(header: GgufHeader) -> bool:
    return bool(header.get(f"{PREFIX}add_space_prefix", bool, True))


def _respelled(header: GgufHeader, tokens: Sequence[str]) -> Mapping[int, str]:
    """The tokens of spaces alone, which are \u2581 in a text and spaces in the file.

    With a space before each text they stay: the library would put one before such a token, too.
    """
    if _adds_space(header):
        return {}
    taken = frozenset(tokens)
    spaces = {index: token for index, token in enumerate(tokens) if token and not token.strip(" ")}
    new = {index: SPACE * len(token) for index, token in spaces.items()}
    return {index: token for index, token in new.items() if token not in taken}


def _parts(vocabulary: GgufVocabulary) -> dict[str, Any]:
    header = vocabulary.header
    pre = header.get(f"{PREFIX}pre", str, PRE)
    if pre != PRE:
        header.refuse(f"{PREFIX}pre: {pre!r} is not supported with SentencePiece, only {PRE!r} is")
    has_bytes, unknown = _has_bytes(vocabulary), _unknown(vocabulary)
    if not has_bytes and unknown is None:
        header.refuse(
            f"{PREFIX}unknown_token_id is missing, and without tokens of bytes it is what all "
            "other characters become"
        )
    normalizer, decoders = REPLACE, list(DECODERS)
    if _adds_space(header):
        normalizer = {"type": "Sequence", "normalizers": [PREPEND, REPLACE]}
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "normalizer": normalizer,
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": bpe(
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=has_bytes,
            vocab=vocabulary.ids(),
            merges=_merges(vocabulary),
        ),
    }


def _merges(vocabulary: GgufVocabulary) -> list[tuple[str, str]]:
    """The file's, if it lists them: some converters write the same score for all tokens."""
    if f"{PREFIX}merges" in vocabulary.header.metadata:
        return vocabulary.merges()
    scores = _scores(vocabulary)
    for token in vocabulary.of_type(UNUSED):
        if len(token) <= MAX_CHARACTERS and any(_cuts(token, scores)):
            problem = f"{token!r} is unused and can be joined from others, which is not supported"
            vocabulary.header.refuse(f"{PREFIX}token_type: {problem}")
    return pairs_by_score(scores)


def _scores(vocabulary: GgufVocabulary) -> dict[str, float]:
    """The scores of the tokens that are joined from others, or others from them."""
    header, key = vocabulary.header, f"{PREFIX}scores"
    stored: memoryview = header.require(key, memoryview)
    if stored.format != "f" or len(stored) != len(vocabulary.tokens):
        found = f"{len(stored)} entries of type {stored.format}"
        header.refuse(f"{key}: {found} for {len(vocabulary.tokens)} tokens, expected float32")
    scores: dict[str, float] = {}
    for token, kind, score in zip(vocabulary.tokens, vocabulary.types, stored, strict=True):
        if kind != NORMAL:
            continue
        if len(token) > MAX_CHARACTERS:
            header.refuse(
                f"{PREFIX}tokens: one has {len(token)} characters, more than {MAX_CHARACTERS}"
            )
        if not math.isfinite(score):
            header.refuse(f"{key}: {score} of {token!r} is no finite number")
        scores[token] = score
    _refuse_equal(header, scores)
    return scores


def _refuse_equal(header: GgufHeader, scores: Mapping[str, float]) -> None:
    """Raises BadGguf for two tokens that are joined from others and have one score.

    Of these SentencePiece joins the leftmost first, and the library whichever is listed first.
    """
    found: dict[float, str] = {}
    for token, score in scores.items():
        other = found.setdefault(score, token)
        if other is token or not any(_cuts(token, scores)):
            continue
        if any(_cuts(other, scores)):
            header.refuse(
                f"{PREFIX}scores: {other!r} and {token!r} have the same, {score:g}: which of them "
                "is joined first is not told"
            )
        found[score] = token


def _has_bytes(vocabulary: GgufVocabulary) -> bool:
    """True if there is a token for each byte. Raises BadGguf if there is one for some bytes."""
    stored = vocabulary.of_type(BYTE)
    spelled = BYTES.intersection(vocabulary.tokens)
    if not stored and not spelled:
        return False
    if BYTES.symmetric_difference(stored) or len(spelled) < len(BYTES):
        vocabulary.header.refuse(
            f"{PREFIX}token_type: {len(stored)} tokens are of type {BYTE}, expected are "
            "<0x00> to <0xFF> and no others"
        )
    return True


def _unknown(vocabulary: GgufVocabulary) -> str | None:
    """The token of a character that has neither a token nor bytes."""
    index: int | None = vocabulary.header.get(f"{PREFIX}unknown_token_id", int)
    if index is None or not 0 <= index < len(vocabulary.tokens):
        return None
    return vocabulary.tokens[index]


SENTENCEPIECE = TokenizerKind(
    description="SentencePiece's BPE",
    token_types=(NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE),
    keys=frozenset({"pre", "scores", "merges", "add_space_prefix"}),
    off=("add_sep_token", "remove_extra_whitespaces"),
    adds_bos=_adds_bos,
    respelled=_respelled,
    parts=_parts,
)
