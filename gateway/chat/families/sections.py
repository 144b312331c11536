"""Calls with JSON arguments between tokens, in sections of such calls. Pure."""

import re
from dataclasses import dataclass
from functools import partial

from gateway.chat.calls import Calls, parse_between, read_arguments
from gateway.chat.source import Source, Steps
from gateway.chat.tool_format import IsCall, Parse

MAX_HEAD_CHARACTERS = 256


@dataclass(frozen=True, slots=True)
class Section:
    """A family's markers."""

    opening: str
    closing: str
    call_opening: str
    call_closing: str
    # What comes before a call's arguments: the group `name`, and `id` where the model writes ids.
    head: re.Pattern[str]
    arguments_end: str = ""  # text before the end of a call, which a model may forget


def parser_of(section: Section) -> Parse:
    """The parser of such calls."""
    return partial(_parse, section=section)


def detector_of(section: Section) -> IsCall:
    """Tells whether a call of one of some functions is the first after an opening at an offset."""
    return partial(_is_call, section=section)


def _parse(source: Source, calls: Calls, section: Section) -> Steps[None]:
    read = partial(_read_section, section=section)
    yield from parse_between(source, calls, section.opening, section.closing, read)


def _read_section(source: Source, at: int, calls: Calls, section: Section) -> Steps[bool]:
    """Reads all calls of a section, and its end; False, with nothing taken, if there are none."""
    if not (yield from _read_call(source, at, calls, section)):
        return False
    while (yield from _read_call(source, 0, calls, section)):
        pass
    at = yield from source.skip_space(0)
    if (yield from source.starts_with(section.closing, at)):
        source.take(at + len(section.closing))
    return True


def _is_call(
    source: Source, at: int, opening: str, names: frozenset[str], section: Section
) -> Steps[bool]:
    return (yield from _find_head(source, at + len(opening), names, section)) is not None


def _read_call(source: Source, at: int, calls: Calls, section: Section) -> Steps[bool]:
    """Reads one call; False, with nothing taken, if there is none."""
    head = yield from _find_head(source, at, calls.names, section)
    if head is None:
        return False
    calls.begin(head["name"], head.groupdict().get("id"))
    source.take(head.end())
    yield from read_arguments(source, calls.add_arguments)
    for word in filter(None, (section.arguments_end, section.call_closing)):
        at = yield from source.skip_space(0)
        if (yield from source.starts_with(word, at)):
            source.take(at + len(word))
    return True


def _find_head(
    source: Source, at: int, names: frozenset[str], section: Section
) -> Steps[re.Match[str] | None]:
    """The text before the arguments of a call at an offset."""
    at = yield from source.skip_space(at)
    if not (yield from source.starts_with(section.call_opening, at)):
        return None
    start = at + len(section.call_opening)
    limit = start + MAX_HEAD_CHARACTERS
    while (head := section.head.match(source.text, start)) is None:
        if len(source.text) >= limit or not (yield from source.more()):
            return None
    return head if head.end() < limit and head["name"] in names else None
