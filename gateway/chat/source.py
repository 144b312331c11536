"""Text that arrives in pieces, parsed by code that reads as if it were all there.

A parser is a generator over a `Source`. It decides by what it sees, and where that is not enough it
suspends until there is more; so what it makes of a text cannot depend on where the text was cut.
"""

import re
from collections.abc import Callable, Generator
from typing import TypeVar

from gateway.chat.parts import Part

Result = TypeVar("Result")
Steps = Generator[None, None, Result]  # suspends where it needs more text

_SPACE = re.compile(r"\s*")


class Source:
    """The text that no parser has taken yet. Offsets count from its first character."""

    __slots__ = ("is_ended", "text")

    def __init__(self) -> None:
        self.text = ""
        self.is_ended = False

    def take(self, end: int) -> str:
        """The text before an offset, which is gone then."""
        taken, self.text = self.text[:end], self.text[end:]
        return taken

    def more(self) -> Steps[bool]:
        """Waits for more text; False when none will come. Nothing is taken meanwhile."""
        num_known = len(self.text)
        while len(self.text) == num_known:
            if self.is_ended:
                return False
            yield
        return True

    def skip_space(self, at: int) -> Steps[int]:
        """The offset of the next character that is no space, or of the end."""
        while True:
            match = _SPACE.match(self.text, at)
            assert match is not None
            at = match.end()
            if at < len(self.text) or not (yield from self.more()):
                return at

    def starts_with(self, word: str, at: int) -> Steps[bool]:
        """Whether a word stands at an offset."""
        while True:
            found = self.text[at : at + len(word)]
            if found == word:
                return True
            if not word.startswith(found) or not (yield from self.more()):
                return False

    def pass_until(self, marker: str, emit: Callable[[str], None]) -> Steps[int | None]:
        """Emits the text up to a marker and the space before it, which stay.

        Returns the offset of the marker, or None when all text has come and held none.
        """
        while True:
            found = self.text.find(marker)
            end = found if found >= 0 else len(self.text) - _beginning(self.text, marker)
            shown = self.take(len(self.text[:end].rstrip()))
            if shown:
                emit(shown)
            if found >= 0:
                return found - len(shown)
            if not (yield from self.more()):
                return None


def _beginning(text: str, marker: str) -> int:
    """How many characters at the end of a text may begin a marker that is not in it."""
    at = text.find(marker[0], max(0, len(text) - len(marker) + 1))
    while at >= 0:
        if marker.startswith(text[at:]):
            return len(text) - at
        at = text.find(marker[0], at + 1)
    return 0


class Parser:
    """A parser in the hands of whoever has the pieces."""

    def __init__(self, parse: Callable[[Source, list[Part]], Steps[None]]) -> None:
        self._source = Source()
        self._events: list[Part] = []
        self._steps: Steps[None] | None = parse(self._source, self._events)

    def push(self, text: str, *, is_last: bool = False) -> list[Part]:
        """What a piece of text means, as far as that is certain; after the last piece it is."""
        self._source.text += text
        self._source.is_ended = is_last
        if self._steps is not None and next(self._steps, self) is self:
            self._steps = None
        events = self._events[:]
        self._events.clear()
        return events
