"""Finds the end of a JSON object or array in text that arrives in pieces. Pure; no validation."""

import json
import re
from collections.abc import Callable

_OUTSIDE = re.compile(r'["{}\[\]]')
_INSIDE = re.compile(r'["\\]')
_CONTROL = re.compile(r"[\x00-\x1f]")
_ESCAPES = frozenset('"\\/bfnrtu')  # what may follow a backslash


class JsonEnd:
    """Tracks brackets and strings. With depth 1 the first bracket has been consumed already."""

    def __init__(self, depth: int = 0) -> None:
        self.is_found = False
        self._depth = depth
        self.is_in_string = False
        self._is_escaped = False

    def scan(self, text: str, at: int = 0) -> int:
        """Reads text from offset `at` on; returns the offset after the end, or after the text."""
        while at < len(text):
            if self._is_escaped:
                self._is_escaped = False
                at += 1
                continue
            match = (_INSIDE if self.is_in_string else _OUTSIDE).search(text, at)
            if match is None:
                return len(text)
            at = match.end()
            self._follow(match[0])
            if self.is_found:
                return at
        return at

    def _follow(self, char: str) -> None:
        match char:
            case '"':
                self.is_in_string = not self.is_in_string
            case "\\":
                self._is_escaped = True
            case "{" | "[":
                self._depth += 1
            case _:
                self._depth -= 1
                self.is_found = self._depth <= 0


class JsonRepair:
    """Writes JSON in which models put line breaks, and backslashes that escape nothing, in strings.

    Text comes piece by piece, up to the end of the object; what is JSON stays as it is.
    """

    def __init__(self) -> None:
        self._is_in_string = False
        self._is_escaped = False

    def write(self, text: str, emit: Callable[[str], None]) -> None:
        """Passes on more text of the object."""
        at = 0
        while at < len(text):
            if self._is_escaped:
                self._is_escaped = False
                emit(_escaped(text[at]))
                at += 1
                continue
            match = _INSIDE.search(text, at) if self._is_in_string else None
            end = match.start() if match else len(text)
            if not self._is_in_string:
                quote = text.find('"', at)
                end = len(text) if quote < 0 else quote
            plain = text[at:end]
            if plain:
                emit(_CONTROL.sub(_control, plain) if self._is_in_string else plain)
            if end < len(text):
                self._follow(text[end], emit)
            at = end + 1

    def _follow(self, char: str, emit: Callable[[str], None]) -> None:
        if char == "\\":
            self._is_escaped = True
        else:
            self._is_in_string = not self._is_in_string
        emit(char)


def _control(match: re.Match[str]) -> str:
    return json.dumps(match[0])[1:-1]


def _escaped(char: str) -> str:
    """The JSON of a backslash and its follower; one that escapes nothing is one of the text."""
    if char < " ":
        return json.dumps(char)[2:-1]
    return char if char in _ESCAPES else f"\\{char}"
