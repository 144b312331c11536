"""Calls whose arguments stand between tags, one by one, as several families write them. Pure.

The arguments are passed on as a JSON object, with the types that the function's schema says; text
is passed on while it comes. Where a value ends is said in `value_end`.

A model may leave out the opening tag before a function, or write several functions after one.
Closing tags that close nothing are dropped once the answer has a call.
"""

import json
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from gateway.chat.calls import Calls
from gateway.chat.families.typed_values import as_json, is_known, is_text
from gateway.chat.families.value_end import (
    MAX_NAME_CHARACTERS,
    Tags,
    ValueEnd,
    json_end,
    pass_value,
)
from gateway.chat.source import Source, Steps
from gateway.chat.tool_format import IsCall, Parse


def parser_of(tags: Tags) -> Parse:
    """The parser of calls in such tags."""
    return partial(_parse, tags=tags)


def detector_of(tags: Tags) -> IsCall:
    """Tells whether a call of one of some functions begins with an opening at an offset."""
    return partial(_is_call, tags=tags)


def _is_call(
    source: Source, at: int, opening: str, names: frozenset[str], tags: Tags
) -> Steps[bool]:
    if opening != tags.opening:
        return (yield from begins_function(source, at, names, tags, is_bare=True))
    start = yield from source.skip_space(at + len(opening))
    # A name alone may be text that speaks of it.
    is_bare = not tags.head_start
    return (yield from begins_function(source, start, names, tags, is_bare=is_bare))


def _parse(source: Source, calls: Calls, tags: Tags) -> Steps[None]:
    # Where a grammar holds calls, it holds none without the tag.
    bare = (tags.head_start,) if tags.head_start and not calls.is_held else ()
    closing = tuple(filter(None, (tags.closing, tags.call_end)))
    while True:
        ends = closing if calls.has_any else ()
        found = yield from source.pass_until_any((tags.opening, *bare, *ends), calls.say)
        if found is None:
            break
        marker, word = found
        behind = marker + len(word)
        if word in closing:
            source.take(behind)
            continue
        start = marker if word in bare else (yield from source.skip_space(behind))
        if not (yield from begins_function(source, start, calls.names, tags, is_bare=word in bare)):
            calls.say(source.take(behind))
            continue
        source.take(start)
        yield from _read_functions(source, calls, tags)
    calls.say(source.take(len(source.text)))


def begins_function(
    source: Source, at: int, names: frozenset[str], tags: Tags, *, is_bare: bool
) -> Steps[bool]:
    """True if a call of one of the functions begins at an offset; nothing is taken.

    Without the opening tag its head is not enough, since a text may speak of it.
    """
    head = yield from _match(source, tags.head, at)
    if head is None or head[1].strip() not in names:
        return False
    if not is_bare:
        return True
    next_at = yield from source.skip_space(head.end())
    for word in (tags.key_start, tags.call_end or tags.closing):
        if (yield from source.starts_with(word, next_at)):
            return True
    return False


def _match(source: Source, pattern: re.Pattern[str], at: int) -> Steps[re.Match[str] | None]:
    """A match at an offset, once it cannot grow; None if there is none within the limit."""
    while True:
        match = pattern.match(source.text, at)
        if match is not None:
            return match if match.end() - at <= MAX_NAME_CHARACTERS else None
        if len(source.text) - at > MAX_NAME_CHARACTERS or not (yield from source.more()):
            return None


def _read_functions(source: Source, calls: Calls, tags: Tags) -> Steps[None]:
    """Reads the functions that one tag opens, and its closing tag."""
    while True:
        head = tags.head.match(source.text)
        assert head is not None, "a function has begun"
        name = head[1].strip()
        source.take(head.end())
        calls.begin(name)
        parameters = calls.parameters.get(name, {})
        yield from _Arguments(source, calls, tags, parameters).read()
        at = yield from source.skip_space(0)
        if not tags.head_start or not (yield from source.starts_with(tags.head_start, at)):
            break
        if not (yield from begins_function(source, at, calls.names, tags, is_bare=True)):
            break
        source.take(at)
    if tags.call_end:
        yield from _take_end(source, tags.closing)


def _take_end(source: Source, end: str) -> Steps[bool]:
    """Takes a closing tag, which a model may forget; False if the output was cut off in it."""
    at = yield from source.skip_space(0)
    if (yield from source.starts_with(end, at)):
        source.take(at + len(end))
    elif end.startswith(source.text[at:]):
        source.take(len(source.text))
        return not source.is_cut
    return True


class _Arguments:
    """Reads the arguments of one call, up to the end of its function."""

    def __init__(
        self, source: Source, calls: Calls, tags: Tags, parameters: Mapping[str, Any]
    ) -> None:
        self._source, self._calls, self._tags = source, calls, tags
        self._parameters = parameters
        self._names: set[str] = set()

    def read(self) -> Steps[None]:
        """Passes them on as an object; where the output is cut off, it stays open."""
        self._calls.add_arguments("{")
        is_whole, end = True, self._tags.call_end or self._tags.closing
        while is_whole and (yield from self._has_more()):
            key = yield from _match(self._source, self._tags.key, 0)
            if key is None:
                if len(self._source.text) > MAX_NAME_CHARACTERS:
                    break  # no name is as long
                self._source.take(len(self._source.text))
                is_whole = not self._source.is_cut
                break
            self._source.take(key.end())
            # The tag may say itself whether it is a text; else the schema does.
            said = key.groupdict().get("is_text")
            name = key[1].strip()
            is_plain = is_text(self._parameters, name) if said is None else said == "true"
            is_whole = yield from self._read_value(name, is_plain)
        if is_whole and (yield from _take_end(self._source, end)):
            self._calls.add_arguments("}")

    def _has_more(self) -> Steps[bool]:
        """True if another argument begins; the space before it is taken."""
        at = yield from self._source.skip_space(0)
        if not (yield from self._source.starts_with(self._tags.key_start, at)):
            return bool(self._source.text[at:]) and self._tags.key_start.startswith(
                self._source.text[at:]
            )
        self._source.take(at)
        return True

    def _read_value(self, name: str, is_plain: bool) -> Steps[bool]:
        """Passes on one argument; False if the output was cut off inside it."""
        if name in self._names:  # said twice: the first counts
            return (yield from self._pass(lambda text: None))
        head = f"{', ' if self._names else ''}{json.dumps(name, ensure_ascii=False)}: "
        self._names.add(name)
        add = self._calls.add_arguments
        if is_plain:
            add(f'{head}"')
            is_whole = yield from self._pass(
                lambda text: add(json.dumps(text, ensure_ascii=False)[1:-1])
            )
            if is_whole:
                add('"')
            return is_whole
        end = yield from json_end(self._source, self._tags)
        if end is None:
            self._source.take(len(self._source.text))
            return False
        pieces = [self._source.take(end)]
        is_whole = yield from self._pass(pieces.append)
        if is_whole:
            add(head + as_json("".join(pieces), self._parameters, name))
        return is_whole

    def _pass(self, emit: Callable[[str], None]) -> Steps[bool]:
        ends = ValueEnd(self._tags, self._is_next, self._is_call, self._calls.is_held)
        return (yield from pass_value(self._source, ends, emit))

    def _is_call(self, at: int, is_bare: bool) -> Steps[bool]:
        names = self._calls.names
        return (yield from begins_function(self._source, at, names, self._tags, is_bare=is_bare))

    def _is_next(self, name: str) -> bool:
        """True if a name is that of an argument that may follow."""
        return name not in self._names and is_known(self._parameters, name)
