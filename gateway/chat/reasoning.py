"""Splits the reasoning, between <think> and </think>, from the answer. Pure.

Space next to the two markers belongs to neither. Text that does not begin with <think> has no
reasoning, unless the prompt has opened it.
"""

from collections.abc import Callable
from functools import partial

from gateway.chat.parts import Content, Part, Reasoning
from gateway.chat.source import Parser, Source, Steps

OPEN = "<think>"
CLOSE = "</think>"


def reasoning_parser(*, is_open: bool) -> Parser:
    """The parser of one output; with `is_open` it begins inside the reasoning."""
    return Parser(partial(_split, is_open=is_open))


def is_open_at_end(prompt: str) -> bool:
    """Whether the prompt ends with the marker that opens the reasoning."""
    return prompt.rstrip().endswith(OPEN)


def is_closed_at_end(prompt: str) -> bool:
    """Whether the prompt ends with reasoning that is over."""
    return prompt.rstrip().endswith(CLOSE)


def _split(source: Source, events: list[Part], *, is_open: bool) -> Steps[None]:
    start = yield from source.skip_space(0)
    if (yield from source.starts_with(OPEN, start)):
        source.take(start + len(OPEN))
    elif not is_open:
        yield from _pass_all(source, lambda text: events.append(Content(text)))
        return
    yield from _drop_space(source)
    close = yield from source.pass_until(CLOSE, lambda text: events.append(Reasoning(text)))
    if close is None:  # the output ended before the reasoning did
        yield from _pass_all(source, lambda text: events.append(Reasoning(text)))
        return
    source.take(close + len(CLOSE))
    yield from _drop_space(source)
    yield from _pass_all(source, lambda text: events.append(Content(text)))


def _drop_space(source: Source) -> Steps[None]:
    source.take((yield from source.skip_space(0)))


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
