"""Calls and reasoning of the Gemma 4 family. Pure.

What the model writes is <|tool_call>call:f{a:<|"|>x<|"|>,b:1}<tool_call|>, once per call: names
without quotes, and texts between tokens of their own. A call is passed on once it has come as a
whole. Reasoning is <|channel>thought, a line break, the thoughts and <channel|>.
"""

import re

from gateway.chat.calls import Calls, parse_between
from gateway.chat.families.literals import Language, NamedValues, Quote, read_literal_arguments
from gateway.chat.reasoning_format import ReasoningFormat
from gateway.chat.source import Source, Steps
from gateway.chat.tool_format import ToolCallFormat
from gateway.structure.families.literal_calls import LiteralCalls

OPEN, CLOSE, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
MAX_HEAD_CHARACTERS = 256
_HEAD = re.compile(r"\s*call:\s*([\w.-]+)\s*\{")
MEMBERS = NamedValues("}", ":", has_bare_names=True)
# Nothing is escaped in a text; JSON's texts are read, too.
LANGUAGE = Language((Quote(QUOTE, has_escapes=False), Quote('"')), objects=MEMBERS)


def parse_gemma4(source: Source, calls: Calls) -> Steps[None]:
    """Parses calls between their tokens; a closing one that closes nothing is dropped."""
    yield from parse_between(source, calls, OPEN, CLOSE, _read_call)


def _read_call(source: Source, at: int, calls: Calls) -> Steps[bool]:
    """Reads one call; False, with nothing taken, if there is none."""
    head = yield from _find_head(source, at, calls.names)
    return (yield from read_literal_arguments(source, head, calls, LANGUAGE, MEMBERS))


def _find_head(source: Source, at: int, names: frozenset[str]) -> Steps[re.Match[str] | None]:
    """The text before the arguments of a call at an offset."""
    while (head := _HEAD.match(source.text, at)) is None:
        if len(source.text) - at > MAX_HEAD_CHARACTERS or not (yield from source.more()):
            return None
    return head if head.end() - at <= MAX_HEAD_CHARACTERS and head[1] in names else None


def _is_call(source: Source, at: int, opening: str, names: frozenset[str]) -> Steps[bool]:
    return (yield from _find_head(source, at + len(opening), names)) is not None


GEMMA4 = ToolCallFormat(
    "gemma4",
    parse_gemma4,
    lambda template: OPEN in template and CLOSE in template,
    shown_tokens=(OPEN, CLOSE, QUOTE),
    writing=LiteralCalls(
        OPEN,
        CLOSE,
        name_start="call:",
        name_end="{",
        call_end="}",
        separator=":",
        comma=",",
        quote=QUOTE,
        no_text="",
    ),
    openings=(OPEN,),
    is_call=_is_call,
)
REASONING = ReasoningFormat(
    "gemma4",
    lambda template: "<|channel>" in template and "<channel|>" in template,
    opening="<|channel>",
    closing="<channel|>",
    label="thought",
)
