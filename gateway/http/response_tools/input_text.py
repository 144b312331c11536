"""Reads the text of a custom tool's input from a call's arguments as they arrive. Pure.

The arguments are the object {"input": "..."}, which may end anywhere.
"""

import json
import re

from gateway.text.unicode import whole_characters

INPUT = "input"
_OPENING = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*"')
_HEX = "[0-9a-fA-F]"
_FIRST_HALF = rf"\\u[dD][89abAB]{_HEX}{{2}}"
_NO_SECOND_HALF = rf"[^\\]|\\[^u]|\\u(?![dD][c-fC-F]){_HEX}{{4}}"
# Characters and whole escapes; the first half of a surrogate pair waits for what follows it.
_COMPLETE = re.compile(
    rf'(?:[^"\\]+|\\["\\/bfnrt]|\\u(?![dD][89abAB]){_HEX}{{4}}'
    rf"|{_FIRST_HALF}\\u[dD][c-fC-F]{_HEX}{{2}}|{_FIRST_HALF}(?={_NO_SECOND_HALF}))*"
)


class InputText:
    """Decodes the one text; arguments that are no such object are the text, as they stand."""

    def __init__(self) -> None:
        self._rest = ""  # that was not decoded yet
        self._is_open = False

    def push(self, arguments: str) -> str:
        """The new text in a further piece of the arguments."""
        self._rest += arguments
        if not self._is_open:
            opening = _OPENING.match(self._rest)
            if opening is None:
                return ""
            self._is_open, self._rest = True, self._rest[opening.end() :]
        complete = _COMPLETE.match(self._rest)
        assert complete is not None  # it matches nothing, too
        self._rest = self._rest[complete.end() :]
        return _decoded(complete[0])

    def end(self) -> str:
        """The new text once all arguments have arrived."""
        return "" if self._is_open else self._rest


def to_arguments(text: str) -> str:
    """The arguments of a call with this input."""
    return json.dumps({INPUT: text}, ensure_ascii=False)


def _decoded(escaped: str) -> str:
    return whole_characters(json.loads(f'"{escaped}"', strict=False))
