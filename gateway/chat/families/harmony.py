"""Answers in the harmony format of gpt-oss: messages in channels. Pure.

The channel `analysis` is reasoning; `commentary` with a recipient is a call, without one it is
content, as is `final`. Text outside any message is content.
"""

import re
from collections.abc import Callable

from gateway.chat.calls import Calls, read_arguments
from gateway.chat.parts import Reasoning
from gateway.chat.source import Source, Steps, beginning

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


def parse_harmony(source: Source, calls: Calls) -> Steps[None]:
    """Parses the messages of an answer."""
    while source.text or (yield from source.more()):
        head = yield from _read_head(source)
        if head is None:
            yield from _pass_until_start(source, calls.say)
            continue
        recipient = head["before"] or head["after"]
        name = (recipient or "").removeprefix("functions.")
        source.take(head.end())
        if head["channel"] == "analysis" and recipient is None:
            yield from _pass_body(source, lambda text: calls.events.append(Reasoning(text)))
        elif name in calls.names:
            calls.begin(name)
            if (yield from source.starts_with("{", 0)):
                yield from read_arguments(source, calls)  # text in it may spell a marker
            yield from _pass_body(source, calls.add_arguments, is_call=True)
        elif calls.ends_in_form and head["channel"] == "final":
            yield from _pass_rest(source, calls.say)
        else:
            yield from _pass_body(source, calls.say)


def _pass_rest(source: Source, emit: Callable[[str], None]) -> Steps[None]:
    while source.text or (yield from source.more()):
        emit(source.take(len(source.text)))


def _read_head(source: Source) -> Steps[re.Match[str] | None]:
    """What precedes the text of a message; None where none begins."""
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
    source: Source, emit: Callable[[str], None], *, is_call: bool = False
) -> Steps[None]:
    """Emits the text of a message; the token that ends it is taken, unless it begins another."""
    while True:
        found = [(at, end) for end in ENDS if (at := source.text.find(end)) >= 0]
        if found:
            at, end = min(found)
            if at:
                emit(source.take(at))
            source.take(0 if end == START else len(end))
            return
        held = max(beginning(source.text, end) for end in ENDS)
        if len(source.text) > held:
            emit(source.take(len(source.text) - held))
        if not (yield from source.more()):
            rest = source.take(len(source.text))
            if rest and not is_call:  # no arguments end with the start of a token
                emit(rest)
            return
