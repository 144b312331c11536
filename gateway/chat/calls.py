"""Common parts of the parsers for tool calls. Pure.

A call begins when its name and the opening brace of its arguments have arrived: from then on its
arguments are passed on as they arrive, unchanged but for what strings of JSON may not hold. Before
that nothing has been shown, and text that is no call is returned as content.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gateway.chat.json_end import JsonEnd, JsonRepair
from gateway.chat.parts import CallArguments, CallStart, Content, Part, Reasoning
from gateway.chat.source import Source, Steps
from gateway.text.unicode import to_json

# The usual order of a call's members, in which arguments can be streamed.
_HEAD = re.compile(
    r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,'
    r'\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)


@dataclass(slots=True)
class Calls:
    """Collects the parts of an answer in order; knows the names of the tools."""

    names: frozenset[str]
    events: list[Part]
    new_id: Callable[[], str]
    max_calls: int | None = None  # further ones are dropped
    parameters: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # schemas, by name
    ends_in_form: bool = False  # an answer without calls ends with text that may spell markers
    is_held: bool = False  # a grammar holds each call from its opening on
    _num_calls: int = field(default=0, init=False)
    _is_after_call: bool = field(default=False, init=False)

    def say(self, text: str) -> None:
        """Adds plain text; space after a call is not part of it."""
        if self._is_after_call:
            text = text.lstrip()
        if text:
            self.events.append(Content(text))
            self._is_after_call = False

    def mark(self, text: str) -> None:
        """Drops a marker."""

    def close(self, text: str) -> None:
        """Drops the end of a message."""

    def think(self, text: str) -> None:
        """Adds reasoning."""
        self.events.append(Reasoning(text))

    def begin(self, name: str, call_id: str | None = None) -> None:
        """Begins a call; a model that names its calls expects its own id again."""
        self._num_calls += 1
        self._is_after_call = True
        if self._is_wanted:
            self.events.append(CallStart(self._num_calls - 1, call_id or self.new_id(), name))

    def add_arguments(self, text: str) -> None:
        """Adds arguments to the last call."""
        if text and self._is_wanted:
            self.events.append(CallArguments(self._num_calls - 1, text))

    @property
    def has_any(self) -> bool:
        """True if a call has begun."""
        return self._num_calls > 0

    @property
    def _is_wanted(self) -> bool:
        return self.max_calls is None or self._num_calls <= self.max_calls


# Reads calls at an offset; False, with nothing taken, when there is none.
ReadCalls = Callable[[Source, int, Calls], Steps[bool]]


def parse_between(
    source: Source, calls: Calls, opening: str, closing: str, read: ReadCalls
) -> Steps[None]:
    """Parses the calls after each opening, anywhere in the text.

    An opening without a call is text. A closing that closes nothing is dropped once the answer has
    a call.
    """
    while True:
        ends = (closing,) if calls.has_any else ()
        found = yield from source.pass_until_any((opening, *ends), calls.say)
        if found is None:
            break
        marker, word = found
        behind = marker + len(word)
        if word == closing:
            source.take(behind)
        elif not (yield from read(source, behind, calls)):
            calls.say(source.take(behind))
    calls.say(source.take(len(source.text)))


def read_call(source: Source, at: int, calls: Calls) -> Steps[bool]:
    """Reads {"name": ..., "arguments": {...}} at an offset.

    Returns False, with nothing taken, when there is none. Otherwise takes all of it, and the text
    before the offset.
    """
    call = yield from _find_call(source, at, calls.names)
    if isinstance(call, re.Match):
        yield from _stream_call(source, call, calls)
    elif call is not None:
        calls.begin(call.name)
        calls.add_arguments(to_json(call.arguments))
        source.take(call.end)
    return call is not None


@dataclass(frozen=True, slots=True)
class _WholeCall:
    """A call that has come as a whole."""

    name: str
    arguments: dict[str, Any]
    end: int  # offset after it


def begins_call(source: Source, at: int, names: frozenset[str]) -> Steps[bool]:
    """True if such a call of one of the functions is at an offset; nothing is taken."""
    return (yield from _find_call(source, at, names)) is not None


def read_list(source: Source, at: int, calls: Calls, read: ReadCalls = read_call) -> Steps[bool]:
    """Parses a list of calls; False, with nothing taken, unless one begins at the offset."""
    if not (yield from source.starts_with("[", at)):
        return False
    at = yield from source.skip_space(at + 1)
    if not (yield from read(source, at, calls)):
        return False
    while True:
        at = yield from source.skip_space(0)
        if (yield from source.starts_with("]", at)):
            source.take(at + 1)
            return True
        if not (yield from source.starts_with(",", at)):
            return True
        at = yield from source.skip_space(at + 1)
        if not (yield from read(source, at, calls)):
            return True


def is_json_call(source: Source, at: int, opening: str, names: frozenset[str]) -> Steps[bool]:
    """True if a call, or a list with one, follows an opening."""
    start = yield from source.skip_space(at + len(opening))
    if (yield from source.starts_with("[", start)):
        start = yield from source.skip_space(start + 1)
    return (yield from begins_call(source, start, names))


def _find_call(
    source: Source, at: int, names: frozenset[str]
) -> Steps[re.Match[str] | _WholeCall | None]:
    """A call's head in the usual order of members, or a whole call in another; None for neither."""
    scan, scanned = JsonEnd(), at
    if not (yield from source.starts_with("{", at)):
        return None
    while True:
        head = _HEAD.match(source.text, at)
        if head is not None:
            return head if _parse(head[1]) in names else None
        scanned = scan.scan(source.text, scanned)
        if scan.is_found:
            return _whole_call(source.text[at:scanned], scanned, names)
        if not (yield from source.more()):
            return None


def _stream_call(source: Source, head: re.Match[str], calls: Calls) -> Steps[None]:
    calls.begin(_parse(head[1]))
    source.take(head.end())
    yield from read_arguments(source, calls.add_arguments)
    at = yield from source.skip_space(0)
    if source.text.startswith("}", at):
        source.take(at + 1)
    elif source.text.startswith(",", at):
        yield from _drop_members(source)


def read_arguments(source: Source, emit: Callable[[str], None]) -> Steps[None]:
    """Passes on an object that has begun; if the output ends inside it, it stays incomplete.

    It is what the model wrote, but for characters in strings that JSON has no place for.
    """
    scan, repair = JsonEnd(), JsonRepair()
    while True:
        repair.write(source.take(scan.scan(source.text)), emit)
        if scan.is_found or not (yield from source.more()):
            return


def _drop_members(source: Source) -> Steps[None]:
    """Skips an object's members after its arguments, an id for example."""
    scan = JsonEnd(depth=1)
    while True:
        source.take(scan.scan(source.text))
        if scan.is_found or not (yield from source.more()):
            return


def _whole_call(text: str, end: int, names: frozenset[str]) -> _WholeCall | None:
    """A call with members in another order or without arguments; None if it is none."""
    call = _parse(_repaired(text))
    name = call.get("name") if isinstance(call, dict) else None
    if not isinstance(name, str) or name not in names:
        return None
    arguments = call.get("arguments", call.get("parameters"))
    if isinstance(arguments, str):  # JSON encoded twice
        arguments = _parse(_repaired(arguments))
    if arguments is None:
        arguments = {}
    return _WholeCall(name, arguments, end) if isinstance(arguments, dict) else None


def _repaired(text: str) -> str:
    pieces: list[str] = []
    JsonRepair().write(text, pieces.append)
    return "".join(pieces)


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
