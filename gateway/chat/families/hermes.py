"""Calls of the Hermes and Qwen families: JSON between tags. Pure.

What the model writes is <tool_call>{"name": ..., "arguments": {...}}</tool_call>, once per call.
"""

import re

from gateway.chat.calls import Calls, is_json_call, parse_between, read_call, read_list
from gateway.chat.source import Source, Steps
from gateway.chat.tool_format import ToolCallFormat
from gateway.structure.families.json_calls import JsonCalls

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_JSON_CALL = re.compile(r'"name\\?".*"arguments\\?"', re.DOTALL)


def parse_hermes(source: Source, calls: Calls) -> Steps[None]:
    """Parses calls between tags, anywhere in the text; a tag may hold several, or a list.

    A closing tag that closes nothing is dropped once the answer has a call.
    """
    yield from parse_between(source, calls, OPEN, CLOSE, _read_tagged)


def _read_tagged(source: Source, at: int, calls: Calls) -> Steps[bool]:
    """Parses the calls after an opening tag, and the closing tag; False if there are none."""
    at = yield from source.skip_space(at)
    if (yield from source.starts_with("[", at)):
        if not (yield from read_list(source, at, calls)):
            return False
    elif not (yield from read_call(source, at, calls)):
        return False
    while True:
        next_at = yield from source.skip_space(0)
        if (yield from source.starts_with(CLOSE, next_at)):
            source.take(next_at + len(CLOSE))
            return True
        if (yield from source.starts_with(",", next_at)):
            next_at = yield from source.skip_space(next_at + 1)
        if not (yield from read_call(source, next_at, calls)):
            return True


def _is_in(template: str) -> bool:
    # Others write XML between the same tags.
    return OPEN in template and _JSON_CALL.search(template) is not None


HERMES = ToolCallFormat(
    "hermes",
    parse_hermes,
    _is_in,
    shown_tokens=(OPEN, CLOSE),
    writing=JsonCalls(OPEN, CLOSE),
    openings=(OPEN,),
    is_call=is_json_call,
)
