"""Splits the reasoning, between <think> and </think>, from the answer. Pure.

Space next to the two markers belongs to neither. Text that does not begin with <think> has no
reasoning, unless the prompt has opened it.
"""

from collections.abc import Callable
from typing import Protocol

from gateway.chat.parts import Content, Part, Reasoning
from gateway.chat.source import Parser, Source, Steps
from gateway.text.stretches import Stretch

OPEN = "<think>"
CLOSE = "</think>"


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


def reasoning_parser(*, is_open: bool) -> Parser[Part]:
    """The parser of one output; with `is_open` it begins inside the reasoning."""
    return Parser(lambda source, events: _split(source, PartsOf(events), is_open=is_open))


def stretches(*, is_open: bool) -> Parser[Stretch]:
    """Tells reasoning and the rest of one output apart."""
    return Parser(lambda source, events: _split(source, StretchesOf(events), is_open=is_open))


def is_open_at_end(prompt: str) -> bool:
    """Whether the prompt ends with the marker that opens the reasoning."""
    return prompt.rstrip().endswith(OPEN)


def is_closed_at_end(prompt: str) -> bool:
    """Whether the prompt ends with reasoning that is over."""
    return prompt.rstrip().endswith(CLOSE)


def _split(source: Source, to: Listener, *, is_open: bool) -> Steps[None]:
    start = yield from source.skip_space(0)
    if (yield from source.starts_with(OPEN, start)):
        to.mark(source.take(start + len(OPEN)))
    elif not is_open:
        yield from _pass_all(source, to.say)
        return
    yield from _drop_space(source, to)
    close = yield from source.pass_until(CLOSE, to.think)
    if close is None:  # the output ended before the reasoning did
        yield from _pass_all(source, to.think)
        return
    to.mark(source.take(close + len(CLOSE)))
    yield from _drop_space(source, to)
    yield from _pass_all(source, to.say)


def _drop_space(source: Source, to: Listener) -> Steps[None]:
    to.mark(source.take((yield from source.skip_space(0))))


def _pass_all(source: Source, emit: Callable[[str], None]) -> Steps[None]:
    while True:
        if source.text:
            emit(source.take(len(source.text)))
        if not (yield from source.more()):
            return


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
        self._before = seen[-len(self._closing) :] if self._is_open else seen
