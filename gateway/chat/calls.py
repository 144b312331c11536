"""The parts that all formats of tool calls are built from. Pure.

A call begins when its name and the opening brace of its arguments are there: from then on the
arguments are passed on as they come, character by character what the model wrote. Before that
nothing has been shown, and what turns out to be no call comes back as plain text.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gateway.chat.json_end import JsonEnd
from gateway.chat.parts import CallArguments, CallStart, Content, Part
from gateway.chat.source import Source, Steps

# The usual order of a call's members, with which its arguments can be streamed.
_HEAD = re.compile(
    r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,'
    r'\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)


@dataclass(slots=True)
class Calls:
    """Collects what an answer says, in order; knows which names are tools."""

    names: frozenset[str]
    events: list[Part]
    new_id: Callable[[], str]
    max_calls: int | None = None  # further ones are dropped
    _num_calls: int = field(default=0, init=False)
    _is_after_call: bool = field(default=False, init=False)

    def say(self, text: str) -> None:
        """Plain text; space behind a call is not part of it."""
        if self._is_after_call:
            text = text.lstrip()
        if text:
            self.events.append(Content(text))
            self._is_after_call = False

    def begin(self, name: str) -> None:
        """A call."""
        self._num_calls += 1
        self._is_after_call = True
        if self._is_wanted:
            self.events.append(CallStart(self._num_calls - 1, self.new_id(), name))

    def add_arguments(self, text: str) -> None:
        """More of the arguments of the call begun last."""
        if text and self._is_wanted:
            self.events.append(CallArguments(self._num_calls - 1, text))

    @property
    def _is_wanted(self) -> bool:
        return self.max_calls is None or self._num_calls <= self.max_calls


def read_call(source: Source, at: int, calls: Calls) -> Steps[bool]:
    """Reads {"name": ..., "arguments": {...}} at an offset.

    Returns False, with nothing taken, when there is no such thing. Otherwise all of it is taken,
    with what was before the offset.
    """
    scan, scanned = JsonEnd(), at
    if not (yield from source.starts_with("{", at)):
        return False
    while True:
        head = _HEAD.match(source.text, at)
        if head is not None:
            return (yield from _stream_call(source, head, calls))
        scanned = scan.scan(source.text, scanned)
        if scan.is_found:
            return _whole_call(source, at, scanned, calls)
        if not (yield from source.more()):
            return False


def _stream_call(source: Source, head: re.Match[str], calls: Calls) -> Steps[bool]:
    name = _parse(head[1])
    if name not in calls.names:
        return False
    calls.begin(name)
    source.take(head.end())
    yield from read_arguments(source, calls)
    at = yield from source.skip_space(0)
    if source.text.startswith("}", at):
        source.take(at + 1)
    elif source.text.startswith(",", at):
        yield from _drop_members(source)
    return True


def read_arguments(source: Source, calls: Calls) -> Steps[None]:
    """Passes on an object that has begun; an output that ends in its midst leaves it unfinished."""
    scan = JsonEnd()
    while True:
        calls.add_arguments(source.take(scan.scan(source.text)))
        if scan.is_found or not (yield from source.more()):
            return


def _drop_members(source: Source) -> Steps[None]:
    """Passes over an object's members behind its arguments, an id for instance."""
    scan = JsonEnd(depth=1)
    while True:
        source.take(scan.scan(source.text))
        if scan.is_found or not (yield from source.more()):
            return


def _whole_call(source: Source, start: int, end: int, calls: Calls) -> bool:
    """A call whose members come in another order, or that has no arguments."""
    call = _parse(source.text[start:end])
    name = call.get("name") if isinstance(call, dict) else None
    if not isinstance(name, str) or name not in calls.names:
        return False
    arguments = call.get("arguments", call.get("parameters"))
    if isinstance(arguments, str):  # encoded twice
        arguments = _parse(arguments)
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        return False
    source.take(end)
    calls.begin(name)
    calls.add_arguments(json.dumps(arguments, ensure_ascii=False))
    return True


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
