"""Calls of the Kimi K2 family: JSON arguments between tokens, under the id of the call. Pure."""

import re

from gateway.chat.calls import Calls, read_arguments
from gateway.chat.source import Source, Steps
from gateway.chat.tool_format import ToolCallFormat
from gateway.structure.families.json_calls import SectionCalls

SECTION_OPEN, SECTION_CLOSE = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL_OPEN, CALL_CLOSE = "<|tool_call_begin|>", "<|tool_call_end|>"
ARGUMENTS = "<|tool_call_argument_begin|>"
TOKENS = (SECTION_OPEN, SECTION_CLOSE, CALL_OPEN, CALL_CLOSE, ARGUMENTS)
MAX_HEAD_CHARACTERS = 256
_HEAD = re.compile(rf"\s*((?:functions\.)?([^\s<:]+)(?::\d+)?)\s*{re.escape(ARGUMENTS)}\s*(?=\{{)")


def parse_kimi(source: Source, calls: Calls) -> Steps[None]:
    """Parses the sections of calls."""
    while (marker := (yield from source.pass_until(SECTION_OPEN, calls.say))) is not None:
        begun = marker + len(SECTION_OPEN)
        if not (yield from _read_call(source, begun, calls)):
            calls.say(source.take(begun))
            continue
        while (yield from _read_call(source, 0, calls)):
            pass
        at = yield from source.skip_space(0)
        if (yield from source.starts_with(SECTION_CLOSE, at)):
            source.take(at + len(SECTION_CLOSE))
    calls.say(source.take(len(source.text)))


def is_call(source: Source, at: int, opening: str, names: frozenset[str]) -> Steps[bool]:
    """True if a call of one of the functions is the first after an opening at an offset."""
    return (yield from _find_head(source, at + len(opening), names)) is not None


def _read_call(source: Source, at: int, calls: Calls) -> Steps[bool]:
    """Reads one call; False, with nothing taken, if there is none."""
    head = yield from _find_head(source, at, calls.names)
    if head is None:
        return False
    calls.begin(head[2], head[1])
    source.take(head.end())
    yield from read_arguments(source, calls.add_arguments)
    at = yield from source.skip_space(0)
    if (yield from source.starts_with(CALL_CLOSE, at)):
        source.take(at + len(CALL_CLOSE))
    return True


def _find_head(source: Source, at: int, names: frozenset[str]) -> Steps[re.Match[str] | None]:
    """The text before the arguments of a call at an offset."""
    at = yield from source.skip_space(at)
    if not (yield from source.starts_with(CALL_OPEN, at)):
        return None
    start = at + len(CALL_OPEN)
    limit = start + MAX_HEAD_CHARACTERS
    while (head := _HEAD.match(source.text, start)) is None:
        if len(source.text) >= limit or not (yield from source.more()):
            return None
    return head if head.end() < limit and head[2] in names else None


KIMI = ToolCallFormat(
    "kimi",
    parse_kimi,
    lambda template: SECTION_OPEN in template,
    shown_tokens=TOKENS,
    writing=SectionCalls(*TOKENS),
    openings=(SECTION_OPEN,),
    is_call=is_call,
)
