"""Byte-level BPE, which GGUF calls `gpt2`, with the pre-tokenizers below.

The file names its pre-tokenizer and does not define it, so that any other name is refused.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pagewire.gguf.header import GgufHeader
from pagewire.gguf.vocabulary import (
    CONTROL,
    NORMAL,
    PREFIX,
    UNUSED,
    USER_DEFINED,
    GgufVocabulary,
    TokenizerKind,
    bpe,
)

BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
# The pattern of GPT-2 is that of the library itself.
GPT2 = BYTES | {"use_regex": True}
DIGITS = {"type": "Digits", "individual_digits": True}
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}|"
    r" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Marks are parts of words.
WORDS_WITH_MARKS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}|"
    r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Here a capital within a word begins another one.
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
BEFORE, SHORT_FORM = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
O200K = (
    f"{BEFORE}{UPPER}*{LOWER}+{SHORT_FORM}|{BEFORE}{UPPER}+{LOWER}*{SHORT_FORM}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _split(pattern: str) -> dict[str, Any]:
    return {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """The rule that cuts a text before its pieces are merged, and what goes with it."""

    steps: tuple[Mapping[str, Any], ...]
    normalizer: Mapping[str, Any] | None = None
    ignores_merges: bool = False  # for a piece that is a token
    adds_bos: bool = False  # unless the file says otherwise


PRE_TOKENIZERS = {
    "gpt-2": PreTokenizer((GPT2,)),
    "smollm": PreTokenizer((DIGITS, GPT2)),
    "qwen2": PreTokenizer((_split(WORDS.format(digits="")), BYTES), {"type": "NFC"}),
    "qwen35": PreTokenizer((_split(WORDS_WITH_MARKS), BYTES), {"type": "NFC"}),
    "llama-bpe": PreTokenizer(
        (_split(WORDS.format(digits="{1,3}")), BYTES), ignores_merges=True, adds_bos=True
    ),
    "lfm2": PreTokenizer(
        (_split(WORDS.format(digits="{1,3}")), BYTES), ignores_merges=True, adds_bos=True
    ),
    # Llama 3's, of models whose texts begin with no token: SmolLM3.
    "smaug-bpe": PreTokenizer((_split(WORDS.format(digits="{1,3}")), BYTES), ignores_merges=True),
    # Of gpt-oss; its tokens come from ranks, in which a piece that is a token is not merged.
    "gpt-4o": PreTokenizer((_split(O200K), BYTES), ignores_merges=True),
}


def _pre_tokenizer(header: GgufHeader) -> PreTokenizer:
    pre = header.require(f"{PREFIX}pre", str)
    if pre not in PRE_TOKENIZERS:
        known = ", ".join(PRE_TOKENIZERS)
        header.refuse(f"{PREFIX}pre: {pre!r} is not supported; supported are {known}")
    return PRE_TOKENIZERS[pre]


def _adds_bos(header: GgufHeader) -> bool:
    return _pre_tokenizer(header).adds_bos


def _respelled(header: GgufHeader, tokens: Sequence[str]) -> Mapping[int, str]:
    return {}


def _parts(vocabulary: GgufVocabulary) -> dict[str, Any]:
    pre = _pre_tokenizer(vocabulary.header)
    return {
        "normalizer": pre.normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": list(pre.steps)},
        "decoder": GPT2 | {"add_prefix_space": True},
        "model": bpe(
            ignore_merges=pre.ignores_merges, vocab=vocabulary.ids(), merges=vocabulary.merges()
        ),
    }


BYTE_LEVEL = TokenizerKind(
    description="byte-level BPE",
    token_types=(NORMAL, CONTROL, USER_DEFINED, UNUSED),
    keys=frozenset({"pre", "merges", "scores"}),
    off=("add_sep_token", "add_space_prefix", "remove_extra_whitespaces"),
    adds_bos=_adds_bos,
    respelled=_respelled,
    parts=_parts,
)
