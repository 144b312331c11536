"""Calls and reasoning of the Gemma 4 family. Pure.

What the model writes is <|tool_call>call:f{a:<|"|>x<|"|>,b:1}<tool_call|>, once per call: names
without quotes, and texts between tokens of their own. A call is passed on once it has come as a
whole. Reasoning is <|channel>thought, a line break, the thoughts and <channel|>.
"""

import re

from gateway.chat.calls import Calls
from gateway.chat.families.literals import Language, NamedValues, Quote
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
    while True:
        ends = (CLOSE,) if calls.has_any else ()
        found = yield from source.pass_until_any((OPEN, *ends), calls.say)
        if found is None:
            break
        marker, word = found
        behind = marker + len(word)
        if word == CLOSE:
            source.take(behind)
        elif not (yield from _read_call(source, behind, calls)):
            calls.say(source.take(behind))
    calls.say(source.take(len(source.text)))


def _read_call(source: Source, at: int, calls: Calls) -> Steps[bool]:
    """Reads one call; False, with nothing taken, if there is none."""
    head = yield from _find_head(source, at, calls.names)
    if head is None:
        return False
    arguments = yield from LANGUAGE.members(source, head.end(), MEMBERS)
    if arguments is None:
        return False
    calls.begin(head[1])
    calls.add_arguments(arguments[0])
    source.take(arguments[1])
    return True


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
