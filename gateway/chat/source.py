"""Text that arrives in pieces, for parsers written as if it were complete.

A parser is a generator over a `Source`. It suspends where it needs more text to decide; so its
result cannot depend on how the text was split.
"""

import re
from collections.abc import Callable, Generator
from typing import Generic, TypeVar

Result = TypeVar("Result")
Event = TypeVar("Event")
Steps = Generator[None, None, Result]  # suspends where it needs more text

_SPACE = re.compile(r"\s*")


class Source:
    """The text that no parser has taken yet. Offsets count from its first character."""

    __slots__ = ("is_complete", "is_ended", "text")

    def __init__(self) -> None:
        self.text = ""
        self.is_ended = False
        self.is_complete = False  # at its end: the model ended the text, no limit cut it off

    @property
    def is_cut(self) -> bool:
        """True if the text has ended where more would have come."""
        return self.is_ended and not self.is_complete

    def take(self, end: int) -> str:
        """Removes and returns the text before an offset."""
        taken, self.text = self.text[:end], self.text[end:]
        return taken

    def more(self) -> Steps[bool]:
        """Waits for more text; False at the end. Nothing is taken in the meantime."""
        num_known = len(self.text)
        while len(self.text) == num_known:
            if self.is_ended:
                return False
            yield
        return True

    def skip_space(self, at: int) -> Steps[int]:
        """The offset of the next character that is not a space, or of the end."""
        while True:
            match = _SPACE.match(self.text, at)
            assert match is not None
            at = match.end()
            if at < len(self.text) or not (yield from self.more()):
                return at

    def starts_with(self, word: str, at: int) -> Steps[bool]:
        """True if a word begins at an offset."""
        while True:
            found = self.text[at : at + len(word)]
            if found == word:
                return True
            if not word.startswith(found) or not (yield from self.more()):
                return False

    def pass_until(self, marker: str, emit: Callable[[str], None]) -> Steps[int | None]:
        """Emits the text up to a marker and the space before it, which are not taken.

        Returns the offset of the marker, or None when the text ended without one.
        """
        found = yield from self.pass_until_any((marker,), emit)
        return None if found is None else found[0]

    def pass_until_any(
        self, markers: tuple[str, ...], emit: Callable[[str], None]
    ) -> Steps[tuple[int, str] | None]:
        """The same for several markers; returns the first one with its offset."""
        while True:
            known = [(at, word) for word in markers if (at := self.text.find(word)) >= 0]
            at, marker = min(known, default=(-1, ""))
            end = at
            if at < 0:
                end = len(self.text) - max(beginning(self.text, word) for word in markers)
            shown = self.take(len(self.text[:end].rstrip()))
            if shown:
                emit(shown)
            if at >= 0:
                return at - len(shown), marker
            if not (yield from self.more()):
                return None


def beginning(text: str, marker: str) -> int:
    """Length of the longest end of the text that may begin the marker."""
    at = text.find(marker[0], max(0, len(text) - len(marker) + 1))
    while at >= 0:
        if marker.startswith(text[at:]):
            return len(text) - at
        at = text.find(marker[0], at + 1)
    return 0


class Parser(Generic[Event]):
    """Drives a parser with pieces of text."""

    def __init__(self, parse: Callable[[Source, list[Event]], Steps[None]]) -> None:
        self._source = Source()
        self._events: list[Event] = []
        self._steps: Steps[None] | None = parse(self._source, self._events)

    def push(self, text: str, *, is_last: bool = False, is_complete: bool = False) -> list[Event]:
        """The events that are certain after this piece; all of them after the last.

        `is_complete` says of the last that the model has ended it, and no limit.
        """
        self._source.text += text
        self._source.is_ended, self._source.is_complete = is_last, is_complete
        if self._steps is not None and next(self._steps, self) is self:
            self._steps = None
        events = self._events[:]
        self._events.clear()
        return events
