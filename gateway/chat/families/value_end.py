"""Finds where the value of an argument between tags ends. Pure.

Text may hold the very tags that it stands between. So a value's own tag ends it only where another
argument, the end of the call or the end of the output follows. A model may forget that tag; then
the value ends with an argument that the function has and the call does not yet, or with the end of
the call, if after that comes another call or nothing. Under a grammar no value holds its own tag,
and nothing else ends it.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

from gateway.chat.json_end import JsonEnd
from gateway.chat.source import Source, Steps, beginning

MAX_NAME_CHARACTERS = 256


@dataclass(frozen=True, slots=True)
class Tags:
    """A family's spelling of the parts of a call."""

    head: re.Pattern[str]  # with the function's name, up to its first argument or end
    head_start: str  # empty: the name alone
    key: re.Pattern[str]  # with an argument's name, up to its value
    key_start: str
    value_end: str
    call_end: str  # before the closing tag; may be empty
    has_line_breaks: bool  # around each value
    opening: str = "<tool_call>"
    closing: str = "</tool_call>"


@dataclass(frozen=True, slots=True)
class ValueEnd:
    """Decides which tags end a value."""

    tags: Tags
    is_next: Callable[[str], bool]  # whether an argument of this name may follow
    is_call: Callable[[int, bool], Steps[bool]]  # whether one begins at an offset, bare or not
    is_held: bool  # by a grammar

    @property
    def marks(self) -> tuple[str, ...]:
        """The tags that may end a value."""
        if self.is_held:
            return (self.tags.value_end,)
        ends = (self.tags.value_end, self.tags.call_end, self.tags.closing, self.tags.key_start)
        return tuple(filter(None, ends))

    def is_at(self, source: Source, mark: str, at: int) -> Steps[bool | None]:
        """True if a value ends with a tag at an offset; None where the output was cut off."""
        tags, behind = self.tags, at + len(mark)
        if self.is_held:
            return True
        if mark == tags.key_start:
            return (yield from self._is_key(source, at))
        if mark == tags.value_end:
            follows = (tags.key_start, tags.call_end or tags.closing, tags.closing)
            is_end = yield from _is_followed(source, behind, follows)
            if not is_end or not tags.call_end:
                return is_end
        if mark != tags.closing:
            close = yield from source.skip_space(behind)
            if (yield from source.starts_with(tags.closing, close)):
                behind = close + len(tags.closing)
            elif mark == tags.value_end:
                return True
        return (yield from self._is_over(source, behind))

    def _is_key(self, source: Source, at: int) -> Steps[bool | None]:
        """True if the key of an argument that may follow stands at an offset."""
        while True:
            key = self.tags.key.match(source.text, at)
            if key is not None:
                return self.is_next(key[1].strip())
            if len(source.text) - at > MAX_NAME_CHARACTERS:
                return False
            if not (yield from source.more()):
                return None if source.is_cut else False

    def _is_over(self, source: Source, at: int) -> Steps[bool | None]:
        """True if nothing but another call follows."""
        at = yield from source.skip_space(at)
        opening, closing = self.tags.opening, self.tags.closing
        words = tuple(filter(None, (opening, self.tags.head_start)))
        for word in words if at < len(source.text) else ():
            if (yield from source.starts_with(word, at)):
                is_bare = word != opening
                start = at if is_bare else (yield from source.skip_space(at + len(word)))
                if (yield from self.is_call(start, is_bare)):
                    return True
        if source.is_cut:
            return None
        rest = source.text[at:]
        return source.is_ended and any(word.startswith(rest) for word in (*words, closing))


def _is_followed(source: Source, at: int, words: tuple[str, ...]) -> Steps[bool | None]:
    """True if one of the words or the output's end follows; None where it was cut off before."""
    while True:
        at = yield from source.skip_space(at)
        rest = source.text[at:]
        if any(rest.startswith(word) for word in words):
            return True
        if not any(word.startswith(rest) for word in words):
            return False
        if not (yield from source.more()):
            return None if source.is_cut else True


def pass_value(source: Source, ends: ValueEnd, emit: Callable[[str], None]) -> Steps[bool]:
    """Emits a value and takes the tag that ends it; False if the output was cut off before."""
    tags, marks = ends.tags, ends.marks
    if tags.has_line_breaks and (yield from source.starts_with("\n", 0)):
        source.take(1)
    begin = 0  # of the text in which no tag has been judged
    while True:
        found = [(at, mark) for mark in marks if (at := source.text.find(mark, begin)) >= 0]
        at, mark = min(found, default=(-1, ""))
        end = at if found else len(source.text) - max(beginning(source.text, m) for m in marks)
        end = max(end, begin)
        kept = end - (tags.has_line_breaks and source.text[:end].endswith("\n"))
        emit(source.take(kept))
        if not found:
            begin = 0
            if (yield from source.more()):
                continue
            source.take(len(source.text))  # the tag had begun
            return not source.is_cut
        is_end = yield from ends.is_at(source, mark, at - kept)
        if is_end is None:
            source.take(len(source.text))
            return False
        if is_end:
            source.take(at - kept + (len(mark) if mark == tags.value_end else 0))
            return True
        begin = at - kept + len(mark)


def json_end(source: Source, tags: Tags) -> Steps[int | None]:
    """The offset after a JSON value, whose strings may hold tags; 0 if none is whole.

    None: the output was cut off inside it.
    """
    start = yield from source.skip_space(0)
    if source.text[start : start + 1] not in ("{", "[", '"'):
        return 0
    scan, scanned, begin = JsonEnd(), start, 0
    while True:
        found = source.text.find(tags.value_end, begin)
        end = found if found >= 0 else len(source.text)
        scanned = scan.scan(source.text[:end], scanned)
        if scan.is_found or (found >= 0 and not scan.is_in_string):
            return scanned if _is_json(source.text[start:scanned]) else 0
        if found >= 0:
            begin = found + len(tags.value_end)
        elif not (yield from source.more()):
            return None if source.is_cut else 0


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
