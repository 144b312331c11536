"""tiktoken.model, the tokenizer of the Kimi K2 family: a token in base64 and its rank a line.

The file has no pattern and no controls. The pattern is that of the family, whose tokenizer class
tokenizer_config.json names; controls are in its `added_tokens_decoder`, and others up to a number
are reserved.
"""

import base64
import binascii
import json
from collections.abc import Mapping
from typing import Any

from pagewire.ranks.byte_pairs import BadRanks, ControlToken, RankedVocabulary
from pagewire.ranks.tekken import check_ranks

FILE, CONFIG = "tiktoken.model", "tokenizer_config.json"
NUM_CONTROLS = 256
# The class in the family's own program, which is not run; others may cut texts in another way.
CLASS = "TikTokenTokenizer"
PROGRAM = "tokenization_kimi"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SUFFIX}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SUFFIX}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)


def tokenizer(content: bytes, config: bytes | None) -> dict[str, Any]:
    """The content of tokenizer.json. Raises BadRanks."""
    settings = _settings(config)
    ranks = _ranks(content)
    controls = _controls(settings, len(ranks))
    return RankedVocabulary(ranks, 0, _PATTERN, controls).definition()


def _settings(config: bytes | None) -> Mapping[str, Any]:
    """The settings of a tokenizer whose pattern is known."""
    try:
        settings = json.loads(config or b"{}")
    except ValueError as error:
        raise BadRanks(f"{CONFIG} is not JSON: {error}") from error
    known = settings if isinstance(settings, dict) else {}
    programs = json.dumps(known.get("auto_map"))
    if known.get("tokenizer_class") != CLASS or PROGRAM not in programs:
        problem = f"does not name {CLASS} of {PROGRAM} as its tokenizer_class and in its auto_map"
        raise BadRanks(f"{FILE} says nothing of how texts are cut, and {CONFIG} {problem}")
    return known


def _ranks(content: bytes) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(content.splitlines(), 1):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise BadRanks(f"{FILE}: line {number} is no token and rank") from error
    check_ranks(FILE, ranks, len(ranks))
    return ranks


def _controls(settings: Mapping[str, Any], first: int) -> tuple[ControlToken, ...]:
    """The control tokens after the ranks."""
    controls = {at: f"<|reserved_token_{at}|>" for at in range(first, first + NUM_CONTROLS)}
    found = {at: ControlToken(at, text) for at, text in controls.items()}
    try:
        for number, token in (settings.get("added_tokens_decoder") or {}).items():
            at = int(number)
            found[at] = ControlToken(at, token["content"], token.get("special", True))
    except (AttributeError, TypeError, KeyError, ValueError) as error:
        raise BadRanks(f"{CONFIG}: added_tokens_decoder is none: {error}") from error
    if any(at < first for at in found):
        raise BadRanks(f"{CONFIG}: added_tokens_decoder has an id below {first}, which is a rank")
    return tuple(found[at] for at in sorted(found))
