"""Calls whose arguments stand between tags, one by one. Pure.

| name        | what the model writes                                                    |
| ----------- | ------------------------------------------------------------------------ |
| qwen3_coder | <tool_call><function=f><parameter=a>1</parameter></function></tool_call> |
| glm         | <tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>     |

The arguments are passed on as a JSON object, with the types that the function's schema says; text
is passed on while it comes.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gateway.chat.calls import Calls
from gateway.chat.families.typed_values import as_json, is_text
from gateway.chat.json_end import JsonEnd
from gateway.chat.source import Source, Steps, beginning

OPEN, CLOSE = "<tool_call>", "</tool_call>"
MAX_NAME_CHARACTERS = 256


@dataclass(frozen=True, slots=True)
class Tags:
    """How a family writes the parts of a call."""

    head: re.Pattern[str]  # with the function's name, up to its first argument or end
    key: re.Pattern[str]  # with an argument's name, up to its value
    key_start: str
    value_end: str
    call_end: str  # before the closing tag; may be empty
    has_line_breaks: bool  # around each value


QWEN3_CODER = Tags(
    head=re.compile(r"<function=([^>\n]*)>"),
    key=re.compile(r"<parameter=([^>\n]*)>"),
    key_start="<parameter=",
    value_end="</parameter>",
    call_end="</function>",
    has_line_breaks=True,
)
GLM = Tags(
    head=re.compile(r"([^<\n]*)(?=[<\n])"),
    key=re.compile(r"<arg_key>([^<\n]*)</arg_key>\s*<arg_value>"),
    key_start="<arg_key>",
    value_end="</arg_value>",
    call_end="",
    has_line_breaks=False,
)


def parse_qwen3_coder(source: Source, calls: Calls) -> Steps[None]:
    """Parses calls of the Qwen3-Coder family."""
    yield from _parse(source, calls, QWEN3_CODER)


def parse_glm(source: Source, calls: Calls) -> Steps[None]:
    """Parses calls of the GLM-4.5 family."""
    yield from _parse(source, calls, GLM)


def _parse(source: Source, calls: Calls, tags: Tags) -> Steps[None]:
    while (marker := (yield from source.pass_until(OPEN, calls.say))) is not None:
        begun = marker + len(OPEN)
        start = yield from source.skip_space(begun)
        head = yield from _match(source, tags.head, start)
        name = None if head is None else head[1].strip()
        if head is None or name not in calls.names:
            calls.say(source.take(begun))
            continue
        source.take(head.end())
        calls.begin(name)
        yield from _read_arguments(source, calls, tags, calls.parameters.get(name, {}))
    calls.say(source.take(len(source.text)))


def _match(source: Source, pattern: re.Pattern[str], at: int) -> Steps[re.Match[str] | None]:
    """A match at an offset, once it cannot grow; None if there is none within the limit."""
    while True:
        match = pattern.match(source.text, at)
        if match is not None:
            return match if match.end() - at <= MAX_NAME_CHARACTERS else None
        if _is_long(source, at) or not (yield from source.more()):
            return None


def _is_long(source: Source, at: int) -> bool:
    return len(source.text) - at > MAX_NAME_CHARACTERS


def _read_arguments(
    source: Source, calls: Calls, tags: Tags, parameters: Mapping[str, Any]
) -> Steps[None]:
    """Passes on the arguments of a call that has begun, up to its closing tag."""
    names: set[str] = set()
    calls.add_arguments("{")
    while True:
        at = yield from source.skip_space(0)
        if not (yield from source.starts_with(tags.key_start, at)):
            if tags.key_start.startswith(source.text[at:]):
                source.take(len(source.text))  # cut off
                return
            break
        key = yield from _match(source, tags.key, at)
        if key is None:
            if _is_long(source, at):
                break
            source.take(len(source.text))  # cut off
            return
        name = key[1].strip()
        source.take(key.end())
        head = f"{', ' if names else ''}{json.dumps(name, ensure_ascii=False)}: "
        if name in names:  # said twice: the first counts
            yield from _pass_text(source, tags, lambda text: None)
            continue
        names.add(name)
        if not (yield from _read_value(source, calls, tags, (parameters, name, head))):
            return
    if (yield from _take_end(source, tags.call_end or CLOSE)):
        calls.add_arguments("}")
        if tags.call_end:
            yield from _take_end(source, CLOSE)


def _take_end(source: Source, end: str) -> Steps[bool]:
    """Takes a closing tag, which a model may forget; False if the output was cut off in it."""
    at = yield from source.skip_space(0)
    if (yield from source.starts_with(end, at)):
        source.take(at + len(end))
    elif end.startswith(source.text[at:]):
        source.take(len(source.text))
        return False
    return True


def _read_value(
    source: Source, calls: Calls, tags: Tags, about: tuple[Mapping[str, Any], str, str]
) -> Steps[bool]:
    """Passes on one argument; False if the output ended inside it."""
    parameters, name, head = about
    if is_text(parameters, name):
        calls.add_arguments(f'{head}"')
        is_whole = yield from _pass_text(
            source, tags, lambda text: calls.add_arguments(_escaped(text))
        )
        if is_whole:
            calls.add_arguments('"')
        return is_whole
    end = yield from _tags_in_json(source, tags)
    if end is None:
        source.take(len(source.text))
        return False
    pieces = [source.take(end)]
    is_whole = yield from _pass_text(source, tags, pieces.append)
    if is_whole:
        calls.add_arguments(head + as_json("".join(pieces), parameters, name))
    return is_whole


def _tags_in_json(source: Source, tags: Tags) -> Steps[int | None]:
    """The offset after the closing tags that a JSON value has inside its strings; 0 if none.

    A value that is whole before a later closing tag is JSON. None: the output ended inside it.
    """
    start = yield from source.skip_space(0)
    if source.text[start : start + 1] not in ("{", "[", '"'):
        return 0
    scan, scanned, end, is_inside = JsonEnd(), start, 0, False
    while True:
        found = source.text.find(tags.value_end, end)
        if found < 0:
            if not (yield from source.more()):
                return None if is_inside else 0
            continue
        scanned = scan.scan(source.text[:found], scanned)
        if not scan.is_in_string:
            return end if _is_json(source.text[start:found]) else 0
        end = found + len(tags.value_end)
        is_inside = is_inside or not (yield from _goes_on(source, tags, end))


def _goes_on(source: Source, tags: Tags, at: int) -> Steps[bool]:
    """Whether another argument or the end of the call follows."""
    at = yield from source.skip_space(at)
    for word in (tags.key_start, tags.call_end or CLOSE):
        if (yield from source.starts_with(word, at)):
            return True
    return False


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _pass_text(source: Source, tags: Tags, emit: Callable[[str], None]) -> Steps[bool]:
    """Emits a value up to the tag that ends it; False if the output ended before."""
    if tags.has_line_breaks and (yield from source.starts_with("\n", 0)):
        source.take(1)
    while True:
        found = source.text.find(tags.value_end)
        end = found if found >= 0 else len(source.text) - beginning(source.text, tags.value_end)
        if tags.has_line_breaks and source.text[:end].endswith("\n"):
            end -= 1
        emit(source.take(end))
        if found >= 0:
            source.take(found - end + len(tags.value_end))
            return True
        if not (yield from source.more()):
            source.take(len(source.text))  # the tag had begun
            return False
