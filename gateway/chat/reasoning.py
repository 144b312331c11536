"""Splits the reasoning, between two markers such as <think> and </think>, from the answer. Pure.

Space next to the markers belongs to neither. Text that does not begin with the first one has no
reasoning, unless the prompt has opened it. A model may begin a call without closing its reasoning:
a call of one of the tools ends it.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from gateway.chat.parts import Content, Part, Reasoning
from gateway.chat.reasoning_format import CLOSE, OPEN, ReasoningFormat
from gateway.chat.source import Parser, Source, Steps, beginning
from gateway.text.stretches import Stretch

MOST_LATEST = 4096  # pieces of text with the head of a call


class Listener(Protocol):
    """Takes the text of an answer, piece by piece."""

    def mark(self, text: str) -> None:
        """Takes a marker, or space next to one."""

    def think(self, text: str) -> None:
        """Takes reasoning."""

    def say(self, text: str) -> None:
        """Takes all other text."""


class PartsOf:
    """Collects an answer's parts."""

    def __init__(self, events: list[Part]) -> None:
        self._events = events

    def mark(self, text: str) -> None:
        """Drops a marker."""

    def think(self, text: str) -> None:
        """Adds reasoning."""
        self._events.append(Reasoning(text))

    def say(self, text: str) -> None:
        """Adds content."""
        self._events.append(Content(text))


class StretchesOf:
    """Collects an answer's stretches, which together are its text."""

    def __init__(self, events: list[Stretch]) -> None:
        self._events = events

    def mark(self, text: str) -> None:
        """Adds a marker."""
        if text:
            self._events.append(Stretch(text, False))

    def think(self, text: str) -> None:
        """Adds reasoning."""
        self.mark(text)

    def say(self, text: str) -> None:
        """Adds text of the answer."""
        if text:
            self._events.append(Stretch(text, True))


@dataclass(frozen=True, slots=True)
class CallOpening:
    """The beginnings of calls that end the reasoning."""

    markers: tuple[str, ...]
    # Whether a call of one of the tools begins with a marker at an offset; nothing is taken.
    is_call: Callable[[Source, int, str], Steps[bool]]


def reasoning_parser(
    form: ReasoningFormat,
    *,
    is_open: bool,
    opening: CallOpening | None = None,
    on_call: Callable[[int], None] = lambda num_characters: None,
) -> Parser[Part]:
    """The parser of one output; with `is_open` it begins inside the reasoning.

    `on_call` gets the number of characters that have come since a call ended the reasoning.
    """
    return Parser(
        lambda source, events: _Split(source, PartsOf(events), form, opening, on_call).run(is_open)
    )


def stretches(
    form: ReasoningFormat, *, is_open: bool, opening: CallOpening | None = None
) -> Parser[Stretch]:
    """Tells reasoning and the rest of one output apart."""
    return Parser(
        lambda source, events: _Split(
            source, StretchesOf(events), form, opening, lambda num_characters: None
        ).run(is_open)
    )


@dataclass(frozen=True, slots=True)
class _Split:
    """The splitting of one output."""

    source: Source
    to: Listener
    form: ReasoningFormat
    opening: CallOpening | None
    on_call: Callable[[int], None]

    def run(self, is_open: bool) -> Steps[None]:
        source, to, head, closing = self.source, self.to, self.form.head, self.form.closing
        start = yield from source.skip_space(0)
        if (yield from source.starts_with(head, start)):
            to.mark(source.take(start + len(head)))
        elif not is_open:
            yield from _pass_all(source, to.say)
            return
        yield from self._drop_space()
        end = yield from self._pass_thought()
        if end is None:  # the output ended before the reasoning did
            yield from _pass_all(source, to.think)
            return
        to.mark(source.take(end))
        if source.text.startswith(closing):
            to.mark(source.take(len(closing)))
            yield from self._drop_space()
        else:
            self.on_call(len(source.text))
        yield from _pass_all(source, to.say)

    def _pass_thought(self) -> Steps[int | None]:
        """Passes on the reasoning; returns the offset of what ends it, or None if nothing does."""
        source, opening, closing = self.source, self.opening, self.form.closing
        markers = (closing, *(() if opening is None else opening.markers))
        while (found := (yield from source.pass_until_any(markers, self.to.think))) is not None:
            at, marker = found
            if opening is None or marker == closing:
                return at
            if (yield from opening.is_call(source, at, marker)):
                return at
            self.to.think(source.take(at + len(marker)))
        return None

    def _drop_space(self) -> Steps[None]:
        self.to.mark(self.source.take((yield from self.source.skip_space(0))))


def _pass_all(source: Source, emit: Callable[[str], None]) -> Steps[None]:
    while True:
        if source.text:
            emit(source.take(len(source.text)))
        if not (yield from source.more()):
            return


class OrphanClose:
    """Drops the marker of reasoning that a call has ended already, and the space next to it."""

    def __init__(self, marker: str = CLOSE) -> None:
        self._marker = marker
        self._held = ""  # text that may begin the marker, and space before it
        self._is_dropped = False
        self._is_after = False  # what comes is next to the marker

    def push(self, text: str) -> str:
        """The text to show now."""
        if self._is_dropped:
            return self._after(text)
        seen = self._held + text
        before, marker, behind = seen.partition(self._marker)
        if marker:
            self._held, self._is_dropped, self._is_after = "", True, True
            return before.rstrip() + self._after(behind)
        end = len(seen) - beginning(seen, self._marker)
        shown = seen[:end].rstrip()
        self._held = seen[len(shown) :]
        return shown

    def _after(self, text: str) -> str:
        if self._is_after:
            text = text.lstrip()
            self._is_after = not text
        return text

    def flush(self) -> str:
        """The text withheld so far, where no marker follows."""
        held, self._held = self._held, ""
        return held


class ReasoningTokens:
    """Counts the tokens of the reasoning, its markers included.

    Exact where each token comes alone. Where the reasoning ends within several tokens, the share of
    their text decides, so the count never exceeds the tokens that came.
    """

    def __init__(self, *, is_open: bool, opening: str = OPEN, closing: str = CLOSE) -> None:
        self.count = 0
        self._opening = opening
        self._closing = closing
        self._is_open = is_open
        self._is_over = False
        self._before = ""  # text that may hold the start of a marker
        self._latest = deque[tuple[int, int]](maxlen=MOST_LATEST)  # characters, tokens
        self._num_beyond = 0  # characters that turned out to be a call's

    def end_at_call(self, num_characters: int) -> None:
        """Ends the reasoning so many characters before the end of the text that is added next."""
        self._num_beyond = num_characters

    def add(self, text: str, num_tokens: int) -> None:
        """Follows the next tokens and their text."""
        if self._is_over:
            return
        seen, num_before = self._before + text, len(self._before)
        if not self._is_open:
            begun = seen.lstrip()
            self._is_open = begun.startswith(self._opening)
            if not self._is_open and not self._opening.startswith(begun):  # it does not reason
                self.count, self._is_over = 0, True
                return
        close = seen.find(self._closing)
        if close >= 0:
            num_characters = close + len(self._closing) - num_before
            num_tokens = round(num_tokens * num_characters / len(text))
            self._is_over = True
        self.count += num_tokens
        self._latest.append((len(text), num_tokens))
        if self._num_beyond:
            self._take_back()
        self._before = seen[-len(self._closing) :] if self._is_open else seen

    def _take_back(self) -> None:
        """Takes back what was counted of the call that ended the reasoning."""
        num_left, self._is_over = self._num_beyond, True
        while self._latest and num_left > 0:
            num_characters, num_tokens = self._latest.pop()
            if num_characters > num_left:
                num_tokens = round(num_tokens * num_left / num_characters)
            self.count -= num_tokens
            num_left -= num_characters
