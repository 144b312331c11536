"""Counts what a JSON text will become before it is parsed, as its bytes arrive. Pure.

A parser makes an object of every value, and some hundred bytes of two that a client sends. Commas,
colons and opening brackets outside of texts bound the number of these objects.
"""

_ESCAPES_OF_TEXTS_END = (b"\\\\", b'\\"')  # in this order: of three backslashes the last one counts
_MARKS = (b",", b":", b"[", b"{")
# Bytes that UTF-8 begins a character of four bytes with, and the halves of one as escapes.
_OF_WIDE_CHARACTERS = (b"\xf0", b"\xf1", b"\xf2", b"\xf3", b"\xf4", b"\\ud", b"\\uD")
_LONGEST_OF_THESE = 3


class JsonCount:
    """Counts of the bytes that have arrived."""

    def __init__(self) -> None:
        self.num_marks = 0  # commas, colons and opening brackets: at least one for each value
        self.width = 1  # most bytes that a character has in memory: one wide one widens its text
        self._is_in_text = False
        self._half_escape = b""  # a backslash whose escaped character is still to come
        self._tail = b""

    def add(self, data: bytes) -> None:
        """Counts the next bytes."""
        self._widen(data)
        data = self._half_escape + data
        num_backslashes = len(data) - len(data.rstrip(b"\\"))
        self._half_escape = b"\\" * (num_backslashes % 2)
        if self._half_escape:
            data = data[:-1]
        if b"\\" in data:
            for escape in _ESCAPES_OF_TEXTS_END:
                data = data.replace(escape, b"")
        parts = data.split(b'"')  # every other one is a text
        outside = b"".join(parts[int(self._is_in_text) :: 2])
        self.num_marks += sum(map(outside.count, _MARKS))
        self._is_in_text ^= len(parts) % 2 == 0

    def _widen(self, data: bytes) -> None:
        if self.width == 4:
            return
        seen = self._tail + data
        self._tail = seen[1 - _LONGEST_OF_THESE :]
        if seen.isascii() and b"\\u" not in seen:
            return
        self.width = 4 if any(begin in seen for begin in _OF_WIDE_CHARACTERS) else 2
