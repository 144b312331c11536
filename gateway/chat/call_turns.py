"""Calls and their results as chat templates take them. Pure.

Some templates know one call a turn, and some want ids of nine letters and digits, whatever server
gave a call its id.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from hashlib import blake2b

from gateway.chat.conversation import Message

_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")


def call_forms(messages: tuple[Message, ...]) -> Iterator[tuple[Message, ...]]:
    """The turns as they are, then with short ids, with one call a turn, and with both."""
    yield messages
    short = with_short_ids(messages)
    if short != messages:
        yield short
    single = one_call_a_turn(messages)
    if single != messages:
        yield single
        if (both := with_short_ids(single)) != single:
            yield both


def with_short_ids(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """The turns with ids of nine letters and digits, each a function of the id it stands for."""
    return tuple(
        replace(
            message,
            tool_call_id=None if message.tool_call_id is None else _short(message.tool_call_id),
            tool_calls=tuple(replace(call, id=_short(call.id)) for call in message.tool_calls),
        )
        if message.tool_calls or message.tool_call_id is not None
        else message
        for message in messages
    )


def _short(call_id: str) -> str:
    if _SHORT_ID.fullmatch(call_id):
        return call_id
    return blake2b(call_id.encode("utf-8", "replace"), digest_size=5).hexdigest()[:9]


def one_call_a_turn(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """The turns with each call of a row in a turn of its own, and its result after it."""
    found: list[Message] = []
    at = 0
    while at < len(messages):
        message = messages[at]
        at += 1
        if len(message.tool_calls) < 2:
            found.append(message)
            continue
        end = at
        while end < len(messages) and messages[end].role == "tool":
            end += 1
        found += _pairs(message, list(messages[at:end]))
        at = end
    return tuple(found)


def _pairs(message: Message, results: list[Message]) -> Iterator[Message]:
    """The calls of a turn with their results; results of no such call come last."""
    for index, call in enumerate(message.tool_calls):
        one = replace(message, tool_calls=(call,))
        yield one if index == 0 else replace(one, content=None, reasoning=None)
        for result in [result for result in results if result.tool_call_id == call.id]:
            results.remove(result)
            yield result
    yield from results
