"""Calls of the Llama 3 family: JSON as the whole answer, or after a token. Pure.

What the model writes is {"name": ..., "parameters": {...}}; {...}.
"""

from gateway.chat.calls import Calls, is_json_call, read_call
from gateway.chat.source import Source, Steps
from gateway.chat.tool_format import ToolCallFormat
from gateway.structure.families.json_calls import JsonCalls

TAG = "<|python_tag|>"


def parse_llama3(source: Source, calls: Calls) -> Steps[None]:
    """Parses calls that are the whole answer, or follow the tag."""
    start = yield from source.skip_space(0)
    yield from _read_row(source, start, calls)
    while (marker := (yield from source.pass_until(TAG, calls.say))) is not None:
        behind = marker + len(TAG)
        start = yield from source.skip_space(behind)
        if not (yield from _read_row(source, start, calls)):
            calls.say(source.take(behind))
    calls.say(source.take(len(source.text)))


def _read_row(source: Source, at: int, calls: Calls) -> Steps[bool]:
    """Parses calls separated by semicolons or space."""
    if not (yield from read_call(source, at, calls)):
        return False
    while True:
        at = yield from source.skip_space(0)
        if (yield from source.starts_with(";", at)):
            at = yield from source.skip_space(at + 1)
        if not (yield from read_call(source, at, calls)):
            return True


def _is_in(template: str) -> bool:
    return TAG in template or ('"parameters": ' in template and "<|eot_id|>" in template)


LLAMA3_JSON = ToolCallFormat(
    "llama3_json",
    parse_llama3,
    _is_in,
    shown_tokens=(TAG,),
    writing=JsonCalls(TAG, arguments="parameters", begins_bare=True),
    openings=(TAG,),
    is_call=is_json_call,
)
