"""Calls of the LFM2 family: a list of calls as in Python, between tokens. Pure.

What the model writes is <|tool_call_start|>[f(a='x', b=1), g()]<|tool_call_end|>. A prompt may ask
it for a list of JSON objects there. A call is passed on once it has come as a whole.
"""

import re

from gateway.chat.calls import Calls, is_json_call, parse_between, read_list
from gateway.chat.families.literals import Language, NamedValues, Quote, read_literal_arguments
from gateway.chat.source import Source, Steps
from gateway.chat.tool_format import ToolCallFormat
from gateway.structure.families.literal_calls import LiteralCalls

OPEN, CLOSE = "<|tool_call_start|>", "<|tool_call_end|>"
MAX_HEAD_CHARACTERS = 256
_HEAD = re.compile(r"([\w.-]+)\s*\(")
_HEAD_CHARACTERS = re.compile(r"[\w.-]*\s*")
LANGUAGE = Language(
    quotes=(Quote("'"), Quote('"')), objects=NamedValues("}", ":", has_bare_names=False)
)
ARGUMENTS = NamedValues(")", "=", has_bare_names=True)


def parse_lfm2(source: Source, calls: Calls) -> Steps[None]:
    """Parses the lists of calls."""
    yield from parse_between(source, calls, OPEN, CLOSE, _read_calls)


def _read_calls(source: Source, at: int, calls: Calls) -> Steps[bool]:
    """Reads a list of either kind; False, with nothing taken, unless its first is a call."""
    at = yield from source.skip_space(at)
    if (yield from read_list(source, at, calls)):
        return True
    return (yield from read_list(source, at, calls, _read_call))


def _read_call(source: Source, at: int, calls: Calls) -> Steps[bool]:
    """Reads one call; False, with nothing taken, if there is none."""
    head = yield from _find_head(source, at, calls.names)
    return (yield from read_literal_arguments(source, head, calls, LANGUAGE, ARGUMENTS))


def _find_head(source: Source, at: int, names: frozenset[str]) -> Steps[re.Match[str] | None]:
    """The name of a function, and what opens its arguments."""
    at = yield from source.skip_space(at)
    while (head := _HEAD.match(source.text, at)) is None:
        is_begun = _HEAD_CHARACTERS.fullmatch(source.text, at) is not None
        is_long = len(source.text) - at > MAX_HEAD_CHARACTERS
        if not is_begun or is_long or not (yield from source.more()):
            return None
    return head if head.end() - at <= MAX_HEAD_CHARACTERS and head[1] in names else None


def _is_call(source: Source, at: int, opening: str, names: frozenset[str]) -> Steps[bool]:
    start = yield from source.skip_space(at + len(opening))
    if not (yield from source.starts_with("[", start)):
        return False
    if (yield from _find_head(source, start + 1, names)) is not None:
        return True
    return (yield from is_json_call(source, at, opening, names))


def _is_in(template: str) -> bool:
    # The first templates write tools and results, and leave out calls.
    return OPEN in template or "<|tool_list_start|>" in template


LFM2 = ToolCallFormat(
    "lfm2",
    parse_lfm2,
    _is_in,
    shown_tokens=(OPEN, CLOSE),
    writing=LiteralCalls(
        OPEN,
        CLOSE,
        name_start="",
        name_end="(",
        call_end=")",
        separator="=",
        comma=", ",
        quote="'",
        no_text="\\",
        brackets=("[", "]"),
    ),
    openings=(OPEN,),
    is_call=_is_call,
)
