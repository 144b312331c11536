"""Text that JSON allows and UTF-8 does not: halves of surrogate pairs, as in "\\ud83d"."""

import json
from typing import Any


def whole_characters(text: str) -> str:
    """The text with U+FFFD for every half that has no other half next to it."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def to_json(value: Any, *, allow_nan: bool = True) -> str:
    """JSON with its characters as they are, or escaped if any of them is a half.

    Raises ValueError for a number that is none, unless `allow_nan`.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=allow_nan)
    return text if text.isascii() or whole_characters(text) == text else json.dumps(value)
