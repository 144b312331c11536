"""Calls and reasoning of the Mistral family. Pure.

What the model writes is [TOOL_CALLS][{...}, {...}], or [TOOL_CALLS]name[ARGS]{...} once per call.
"""

import re

from gateway.chat.calls import Calls, is_json_call, read_arguments, read_list
from gateway.chat.reasoning_format import ReasoningFormat
from gateway.chat.source import Source, Steps
from gateway.chat.tool_format import ToolCallFormat, short_id
from gateway.structure.families.json_calls import JsonCalls

MARKER = "[TOOL_CALLS]"
THINK = "[THINK]"
MAX_HEAD_CHARACTERS = 256  # between the marker and the arguments
_HEAD = re.compile(r"([\w.-]+)\s*(?:\[CALL_ID\]\w+\s*)?(?:\[ARGS\])?\s*(?=\{)")


def parse_mistral(source: Source, calls: Calls) -> Steps[None]:
    """Parses a list of calls, or one call, after each marker."""
    while (marker := (yield from source.pass_until(MARKER, calls.say))) is not None:
        behind = marker + len(MARKER)
        start = yield from source.skip_space(behind)
        is_list = yield from source.starts_with("[", start)
        read = read_list if is_list else _read_named
        if not (yield from read(source, start, calls)):
            calls.say(source.take(behind))
    calls.say(source.take(len(source.text)))


def _read_named(source: Source, at: int, calls: Calls) -> Steps[bool]:
    """Parses name{...}, with or without [ARGS] between them."""
    head = yield from _named_head(source, at, calls.names)
    if head is None:
        return False
    calls.begin(head[1])
    source.take(head.end())
    yield from read_arguments(source, calls.add_arguments)
    return True


def _named_head(source: Source, at: int, names: frozenset[str]) -> Steps[re.Match[str] | None]:
    """The text before the arguments of such a call."""
    limit = at + MAX_HEAD_CHARACTERS
    while "{" not in source.text[at:limit]:
        if len(source.text) >= limit or not (yield from source.more()):
            return None
    head = _HEAD.match(source.text, at)
    return head if head is not None and head[1] in names else None


def _is_mistral_call(source: Source, at: int, opening: str, names: frozenset[str]) -> Steps[bool]:
    start = yield from source.skip_space(at + len(opening))
    if (yield from source.starts_with("[", start)):
        return (yield from is_json_call(source, at, opening, names))
    return (yield from _named_head(source, start, names)) is not None


MISTRAL = ToolCallFormat(
    "mistral",
    parse_mistral,
    lambda template: MARKER in template,
    shown_tokens=(MARKER, "[ARGS]", "[CALL_ID]"),
    new_id=short_id,
    writing=JsonCalls(MARKER, is_list=True),
    openings=(MARKER,),
    is_call=_is_mistral_call,
)
REASONING = ReasoningFormat(
    "mistral", lambda template: THINK in template, opening=THINK, closing="[/THINK]"
)
