"""Finds the end of a JSON object or array in text that arrives in pieces. Pure; no validation."""

import re

_OUTSIDE = re.compile(r'["{}\[\]]')
_INSIDE = re.compile(r'["\\]')


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
