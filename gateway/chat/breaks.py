"""Marks in contents that spell tokens of control: a rendered text tells whose tokens are. Pure.

A mark is two first halves of surrogate pairs, which no content of a request holds. It stands after
each character of what would be a token, so a template copies it without knowing it.
"""

import re
from collections.abc import Iterable
from typing import Any

MARK = "\udbff\udbff"
_WRITTEN_MARK = re.compile(MARK + r"|(?<!\\)\\udbff\\udbff")  # as it is, and as ASCII JSON has it


class Breaks:
    """Breaks what spells one of some tokens."""

    def __init__(self, controls: Iterable[str]) -> None:
        longest_first = sorted(filter(None, controls), key=len, reverse=True)
        tokens = "|".join(map(re.escape, longest_first)) or r"(?!)"
        self._spelled = re.compile(tokens)
        self.whole = re.compile(f"(?:{tokens})(?!{MARK})")  # those of a text that are not broken

    def broken(self, value: Any) -> Any:
        """A JSON-like value with all such tokens in its strings broken, keys included."""
        match value:
            case str():
                return self._spelled.sub(lambda token: MARK.join([*token[0], ""]), value)
            case dict():
                return {self.broken(key): self.broken(item) for key, item in value.items()}
            case list() | tuple():
                return [self.broken(item) for item in value]
            case _:
                return value


def is_broken(text: str) -> bool:
    """True if a rendered text has such marks."""
    return _WRITTEN_MARK.search(text) is not None


def mended(text: str) -> str:
    """The text without the marks."""
    return _WRITTEN_MARK.sub("", text)
