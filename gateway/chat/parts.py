"""The parts of an answer."""

from collections.abc import Iterable
from dataclasses import dataclass

from gateway.chat.conversation import ToolCall


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """A piece of the answer's content."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """The start of a tool call; index counts the calls of this answer."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of a call's arguments."""

    index: int
    text: str


Part = Reasoning | Content | CallStart | CallArguments


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole answer."""

    content: str
    reasoning: str | None  # None: not requested, or there was none
    tool_calls: tuple[ToolCall, ...]


def reply_of(parts: Iterable[Part]) -> Reply:
    """The answer made up by some parts."""
    content: list[str] = []
    reasoning: list[str] = []
    starts: list[CallStart] = []
    arguments: list[list[str]] = []
    for part in parts:
        match part:
            case Content(text):
                content.append(text)
            case Reasoning(text):
                reasoning.append(text)
            case CallStart():
                starts.append(part)
                arguments.append([])
            case CallArguments(index, text):
                arguments[index].append(text)
    calls = tuple(
        ToolCall(start.id, start.name, "".join(pieces))
        for start, pieces in zip(starts, arguments, strict=True)
    )
    return Reply("".join(content), "".join(reasoning) if reasoning else None, calls)
