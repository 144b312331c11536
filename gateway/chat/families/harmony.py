"""Answers in the harmony format of gpt-oss: messages in channels. Pure.

The channel `analysis` is reasoning; `commentary` with a recipient is a call, without one it is
content, as is `final`. Text outside any message is content.
"""

import re
from collections.abc import Callable
from typing import Protocol

from gateway.chat.calls import read_arguments
from gateway.chat.reasoning import Listener, StretchesOf
from gateway.chat.reasoning_format import ReasoningFormat
from gateway.chat.source import Source, Steps, beginning
from gateway.chat.tool_format import ToolCallFormat
from gateway.structure.families.channels import ChannelCalls
from gateway.text.stretches import Stretch

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
ENDS = (END, CALL, RETURN, START)
CONSTRAIN = "<|constrain|>"
TOKENS = (CHANNEL, MESSAGE, CONSTRAIN, *ENDS)
ANALYSIS = f"{CHANNEL}analysis{MESSAGE}"
MAX_HEAD_CHARACTERS = 256
# What may stand before a message's text: the role, the recipient and the channel.
_HEAD = re.compile(
    r"\s*(?:<\|start\|>\s*assistant\s*)?(?:to=(?P<before>[^\s<]+)\s*)?"
    r"<\|channel\|>\s*(?P<channel>analysis|commentary|final)\s*(?:to=(?P<after>[^\s<]+))?"
    r"(?:\s*(?:<\|constrain\|>)?\s*[\w-]+)?\s*<\|message\|>"
)


class Messages(Listener, Protocol):
    """Takes the text of an answer in channels."""

    @property
    def names(self) -> frozenset[str]:
        """The functions that may be called."""

    @property
    def ends_in_form(self) -> bool:
        """True if the final message may spell markers."""

    def begin(self, name: str, /) -> None:
        """Begins a call."""

    def add_arguments(self, text: str) -> None:
        """Takes arguments of the call."""

    def close(self, text: str) -> None:
        """Takes the token that ends a message of the answer."""


class StretchesOfMessages(StretchesOf):
    """Collects the stretches of an answer in channels."""

    def __init__(self, events: list[Stretch], names: frozenset[str], *, ends_in_form: bool) -> None:
        super().__init__(events)
        self.names, self.ends_in_form = names, ends_in_form

    def begin(self, name: str, /) -> None:
        """Begins a call, whose head was a marker."""

    def add_arguments(self, text: str) -> None:
        """Adds arguments, which are text of the answer."""
        self.say(text)

    def close(self, text: str) -> None:
        """Adds the token that ends a message, which may be a stop string."""
        self.say(text)


def parse_harmony(source: Source, to: Messages) -> Steps[None]:
    """Parses the messages of an answer."""
    while source.text or (yield from source.more()):
        head = yield from _read_head(source)
        if head is None:
            yield from _pass_until_start(source, to.say)
            continue
        recipient = head["before"] or head["after"]
        name = (recipient or "").removeprefix("functions.")
        to.mark(source.take(head.end()))
        if head["channel"] == "analysis" and recipient is None:
            yield from _pass_body(source, to.think, to.mark)
        elif name in to.names:
            to.begin(name)
            if (yield from source.starts_with("{", 0)):
                yield from read_arguments(source, to.add_arguments)  # they may spell a marker
            yield from _pass_body(source, to.add_arguments, to.close, is_call=True)
        elif to.ends_in_form and head["channel"] == "final":
            yield from _pass_rest(source, to.say)
        else:
            yield from _pass_body(source, to.say, to.close)


def _pass_rest(source: Source, emit: Callable[[str], None]) -> Steps[None]:
    while source.text or (yield from source.more()):
        emit(source.take(len(source.text)))


def _read_head(source: Source) -> Steps[re.Match[str] | None]:
    """The words before the text of a message; None where none begins."""
    while True:
        head = _HEAD.match(source.text)
        if head is not None:
            return head if head.end() <= MAX_HEAD_CHARACTERS else None
        is_over = MESSAGE in source.text or len(source.text) > MAX_HEAD_CHARACTERS
        if is_over or not _may_begin(source.text) or not (yield from source.more()):
            return None


def _may_begin(text: str) -> bool:
    begun = text.lstrip()
    return begun.startswith("<") or "to=".startswith(begun[:3])


def _pass_until_start(source: Source, emit: Callable[[str], None]) -> Steps[None]:
    """Emits text that belongs to no message, up to the next one."""
    emit(source.take(1))
    while True:
        found = source.text.find(START)
        end = found if found >= 0 else len(source.text) - beginning(source.text, START)
        if end:
            emit(source.take(end))
        if found >= 0 or not (yield from source.more()):
            return


def _pass_body(
    source: Source,
    emit: Callable[[str], None],
    close: Callable[[str], None],
    *,
    is_call: bool = False,
) -> Steps[None]:
    """Emits a message's text, and passes on the token that ends it unless it begins another."""
    while True:
        found = [(at, end) for end in ENDS if (at := source.text.find(end)) >= 0]
        if found:
            at, end = min(found)
            if at:
                emit(source.take(at))
            close(source.take(0 if end == START else len(end)))
            return
        held = max(beginning(source.text, end) for end in ENDS)
        if len(source.text) > held:
            emit(source.take(len(source.text) - held))
        if not (yield from source.more()):
            rest = source.take(len(source.text))
            if rest:  # no arguments end with the start of a token
                (close if is_call else emit)(rest)
            return


def _is_in(template: str) -> bool:
    return CHANNEL in template and MESSAGE in template


HARMONY = ToolCallFormat(
    "harmony",
    parse_harmony,
    _is_in,
    shown_tokens=TOKENS,
    writing=ChannelCalls(CHANNEL, MESSAGE, START, CONSTRAIN, END, other_ends=(CALL, RETURN)),
)
# In messages of a channel of its own.
REASONING = ReasoningFormat("harmony", _is_in, opening=ANALYSIS, closing=END, is_in_channels=True)
