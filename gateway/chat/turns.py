"""Turns as chat templates take them. Pure.

Instructions at the start are one turn, and results of tools come in the order of their calls.
Templates differ in what else they refuse, so there are other forms of the same turns to try.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import product, takewhile

from gateway.chat.call_turns import call_forms
from gateway.chat.conversation import Message, parse_arguments

INSTRUCTING = ("system", "developer")
_GAP = "\n\n"  # between turns that become one
NUM_ROLE_FORMS = 7  # of `_roles`
THIN_CHARACTERS = 64


class Arguments(Enum):
    """The form in which calls have their arguments."""

    WRITTEN = "written"  # as an object, or as the text that the model wrote if it is none
    OBJECT = "object"
    TEXT = "text"  # of JSON


@dataclass(frozen=True, slots=True)
class TurnForm:
    """The turns of a conversation as they are given to a template."""

    messages: tuple[Message, ...]
    arguments: Arguments = Arguments.WRITTEN

    def is_whole(self, text: str) -> bool:
        """True if a rendered text has all instructions that come after the first other turn."""
        at = 0
        for message in self.messages[len(_instructions(self.messages)) :]:
            if message.role in INSTRUCTING:
                content = (message.content or "").strip()
                at = text.find(content, at)
                if at < 0:
                    return False
        return True


def in_order(messages: Sequence[Message], *, has_developers: bool) -> tuple[Message, ...]:
    """The turns with their instructions at the start as one, and results in their calls' order.

    Unless the template knows developers, their turns are the system's.
    """
    if not has_developers:
        messages = [_as(message, "developer", "system") for message in messages]
    leading = _instructions(messages)
    rest = _with_sorted_results(messages[len(leading) :])
    if len(leading) < 2:
        return (*leading, *rest)
    is_of_one = len({message.role for message in leading}) == 1
    first = leading[0] if is_of_one else replace(leading[0], role="system")
    return (_joined([first, *leading[1:]]), *rest)


def forms(messages: tuple[Message, ...]) -> Iterator[TurnForm]:
    """The forms of the turns, the ones that change least first.

    They differ in three ways: how calls and results stand, who says what, and how arguments are
    written. A form that is far in one way comes before those that are farther in all together.
    """
    first = TurnForm(messages)
    yield first  # nearly always taken: the others are made where it is not
    calls = [call for message in messages for call in message.tool_calls]
    kinds = [Arguments.WRITTEN]
    if any(isinstance(parse_arguments(call.arguments), str) for call in calls):
        kinds.append(Arguments.OBJECT)
    if calls:
        kinds.append(Arguments.TEXT)
    called = list(call_forms(messages))
    turns: dict[int, list[tuple[Message, ...]]] = {}
    seen = [first]
    places = product(range(len(called)), range(NUM_ROLE_FORMS), range(len(kinds)))
    for called_at, roles_at, kind_at in sorted(places, key=sum):
        if called_at not in turns:
            turns[called_at] = list(_roles(called[called_at]))
        form = TurnForm(turns[called_at][roles_at], kinds[kind_at])
        if form not in seen:
            seen.append(form)
            yield form


def thinned(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """The turns with the first characters of their texts alone, to ask a template for their form.

    What templates refuse is how turns stand, and how calls are written; not what they say.
    """
    return tuple(
        replace(
            message,
            content=_start(message.content),
            reasoning=_start(message.reasoning),
            tool_calls=tuple(
                replace(call, arguments=_thin_arguments(call.arguments))
                for call in message.tool_calls
            ),
        )
        for message in messages
    )


def _start(text: str | None) -> str | None:
    return None if text is None else text[:THIN_CHARACTERS]


def _thin_arguments(arguments: str) -> str:
    """Short arguments as they are; of long ones their kind: an object, or text that is none."""
    if len(arguments) <= THIN_CHARACTERS:
        return arguments
    return "cut" if isinstance(parse_arguments(arguments), str) else "{}"


def _roles(messages: tuple[Message, ...]) -> Iterator[tuple[Message, ...]]:
    """The turns with instructions where they stand, with late ones as the user's, with none."""
    yield messages
    num_leading = len(_instructions(messages))
    late = tuple(_as_users(message) for message in messages[num_leading:])
    yield (*messages[:num_leading], *late)
    leading = [_as(message, "developer", "system") for message in messages[:num_leading]]
    yield (*leading, *late)
    yield _alternating((*leading, *late))
    yield _alternating(_as_users(message) for message in (*leading, *late))
    yield _said_in_results((*leading, *late))
    yield _said_in_results([_as_users(message) for message in (*leading, *late)])


def _as_users(message: Message) -> Message:
    return replace(message, role="user") if message.role in INSTRUCTING else message


def _as(message: Message, role: str, other: str) -> Message:
    return replace(message, role=other) if message.role == role else message


def _instructions(messages: Sequence[Message]) -> list[Message]:
    """The instructions at the start."""
    return list(takewhile(lambda message: message.role in INSTRUCTING, messages))


def _joined(messages: Sequence[Message]) -> Message:
    texts = [message.content for message in messages if message.content]
    return replace(messages[0], content=_GAP.join(texts))


def _alternating(messages: Iterable[Message]) -> tuple[Message, ...]:
    """The turns with the user's neighbouring ones joined."""
    found: list[Message] = []
    for message in messages:
        if found and message.role == found[-1].role == "user":
            found[-1] = _joined([found[-1], message])
        else:
            found.append(message)
    return tuple(found)


def _said_in_results(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The alternating turns, with what the user says after a tool's result as a part of it.

    Templates that let users and assistants take turns do not count calls and results as such.
    """
    found: list[Message] = []
    for message in messages:
        if found and message.role == "user" and found[-1].role == "tool":
            found[-1] = _joined([found[-1], message])
        else:
            found.append(message)
    return _alternating(found)


def _with_sorted_results(messages: Sequence[Message]) -> list[Message]:
    """The turns with each row of results in the order of the calls before it.

    Results of no such call stay after the others. Templates that write no ids tell results apart
    by their order alone.
    """
    found: list[Message] = []
    calls: dict[str, int] = {}  # place among the calls before the results, by id
    results: list[Message] = []
    for message in messages:
        if message.role == "tool":
            results.append(message)
            continue
        if results or message.role != "assistant":
            found += _sorted_by(calls, results)
            calls, results = {}, []
        for call in message.tool_calls:
            calls.setdefault(call.id, len(calls))
        found.append(message)
    return [*found, *_sorted_by(calls, results)]


def _sorted_by(calls: dict[str, int], results: list[Message]) -> list[Message]:
    return sorted(results, key=lambda one: calls.get(one.tool_call_id or "", len(calls)))
