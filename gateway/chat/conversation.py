"""Conversations: turns, tools, and how they are rendered for the model."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from gateway.chat.pictures import PictureSource, pictures_of, without_breaks
from gateway.errors import limits
from gateway.errors.request_errors import invalid
from gateway.text.unicode import whole_characters


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model requested; the arguments are JSON as the model wrote it."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation."""

    role: str
    content: str | None
    name: str | None = None
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None  # the call that a tool's turn answers


@dataclass(frozen=True, slots=True)
class ToolPlaces:
    """The place at which a request describes a tool, for errors."""

    name: str
    parameters: str


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call; the parameters are a JSON schema."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None
    is_strict: bool = False  # arguments must match the schema
    places: ToolPlaces | None = None  # None: those of a chat

    def places_at(self, index: int) -> ToolPlaces:
        """The place of the tool of this index in its request."""
        path = f"tools[{index}].function"
        return self.places or ToolPlaces(f"{path}.name", f"{path}.parameters")


class ToolMode(Enum):
    """The rule by which the model calls tools."""

    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """The rule by which the model calls tools, and the one it must call, if it is one."""

    mode: ToolMode = ToolMode.AUTO
    name: str | None = None  # only with REQUIRED
    allowed: tuple[str, ...] | None = None  # names of the tools that may be used; None: all


ROLES_WITHOUT_CONTENT = ("assistant", "tool")
# The member that holds a call's text that is no JSON object, as in Anthropic's API.
INVALID_JSON = "INVALID_JSON"
CHARACTERS_PER_PART = 128  # that a turn costs in addition to its text
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


@dataclass(frozen=True, slots=True)
class Rendering:
    """Settings of the chat template in addition to turns and tools."""

    kwargs: Mapping[str, Any] = field(default_factory=dict)
    documents: tuple[Mapping[str, Any], ...] = ()
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None  # None: unless the last turn is continued
    continue_final_message: bool = False

    def __post_init__(self) -> None:
        limits.check_count("chat_template_kwargs", len(self.kwargs), limits.MAX_TEMPLATE_KWARGS)
        limits.check_count("documents", len(self.documents), limits.MAX_DOCUMENTS)
        if self.reasoning_effort is not None and self.reasoning_effort not in EFFORTS:
            raise invalid("reasoning_effort", f"must be one of {', '.join(EFFORTS)}")
        if self.continue_final_message and self.add_generation_prompt:
            problem = "contradicts add_generation_prompt; send one of them"
            raise invalid("continue_final_message", problem)

    @property
    def ends_with_generation_prompt(self) -> bool:
        """True if the model begins a new turn."""
        if self.add_generation_prompt is None:
            return not self.continue_final_message
        return self.add_generation_prompt


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns, oldest first, and what their answer may contain."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    parallel_tool_calls: bool = True
    include_reasoning: bool = True
    max_reasoning_tokens: int | None = None  # None: any number
    rendering: Rendering = Rendering()

    def __post_init__(self) -> None:
        if not self.messages:
            raise invalid("messages", "is empty")
        limits.check_count("messages", len(self.messages), limits.MAX_MESSAGES)
        for index, message in enumerate(self.messages):
            _check_message(f"messages[{index}]", message)
        _check_tools(self.tools, self.tool_choice)
        if self.rendering.continue_final_message and not self.messages[-1].content:
            raise invalid("continue_final_message", "the last message has no content to go on with")

    @property
    def num_characters(self) -> int:
        """About what its rendering costs: the characters of all turns, and a share for the rest."""
        counts = (
            len(message.content or "")
            + len(message.reasoning or "")
            + sum(len(call.arguments) for call in message.tool_calls)
            for message in self.messages
        )
        parts = len(self.messages) + len(self.rendering.documents) + 8 * len(self.tools)
        return sum(counts) + CHARACTERS_PER_PART * parts

    @property
    def pictures(self) -> list[PictureSource]:
        """The pictures of its turns, in order."""
        return pictures_of(message.content for message in self.messages)

    def with_marks_apart(self) -> "Conversation":
        """The same with marks of pictures next to the texts, without line breaks in between."""
        return replace(
            self,
            messages=tuple(
                replace(message, content=without_breaks(message.content or ""))
                if message.content
                else message
                for message in self.messages
            ),
        )

    @property
    def usable_tools(self) -> tuple[Tool, ...]:
        """The tools that the model may use."""
        choice = self.tool_choice
        if choice.mode is ToolMode.NONE:
            return ()
        return tuple(
            tool for tool in self.tools if choice.allowed is None or tool.name in choice.allowed
        )


def _check_message(path: str, message: Message) -> None:
    limits.check_bytes(f"{path}.role", message.role, limits.MAX_ROLE_BYTES)
    if not message.role:
        raise invalid(f"{path}.role", "is empty")
    if message.content is None and message.role not in ROLES_WITHOUT_CONTENT:
        raise invalid(f"{path}.content", "may be left out only by an assistant or a tool")
    limits.utf8(f"{path}.content", message.content or "")
    limits.check_count(f"{path}.tool_calls", len(message.tool_calls), limits.MAX_TOOL_CALLS)
    for index, call in enumerate(message.tool_calls):
        _check_name(f"{path}.tool_calls[{index}].function.name", call.name)
        limits.utf8(f"{path}.tool_calls[{index}].function.arguments", call.arguments)


def _check_tools(tools: tuple[Tool, ...], choice: ToolChoice) -> None:
    limits.check_count("tools", len(tools), limits.MAX_TOOLS)
    names: set[str] = set()
    for index, tool in enumerate(tools):
        path = tool.places_at(index).name
        _check_name(path, tool.name)
        if tool.name in names:
            raise invalid(path, f"{tool.name!r} is the name of two tools")
        names.add(tool.name)
    if choice.mode is ToolMode.REQUIRED and not tools:
        raise invalid("tool_choice", "is only allowed with tools")
    for name in (choice.name, *(choice.allowed or ())):
        if name is not None and name not in names:
            raise invalid("tool_choice", f"{name[:64]!r} is not among the tools")


def _check_name(path: str, name: str) -> None:
    limits.check_bytes(path, name, limits.MAX_TOOL_NAME_BYTES)
    if not name:
        raise invalid(path, "is empty")


def parse_arguments(arguments: str) -> dict[str, Any] | str:
    """A call's arguments as templates expect them; the text itself unless it is a JSON object.

    A model's mistake, or a call that was cut off, stays in the conversation as it was written.
    Halves of characters, which JSON may hold, are replaced.
    """
    try:
        parsed = json.loads(arguments if arguments.strip() else "{}")
        text = json.dumps(parsed, ensure_ascii=False, allow_nan=False)  # 1e999 is infinite here
    except (ValueError, RecursionError):
        return arguments
    if not isinstance(parsed, dict):
        return arguments
    whole = whole_characters(text)
    return parsed if whole == text else dict(json.loads(whole))


def object_of(arguments: str) -> dict[str, Any]:
    """A call's arguments as an object; text that is none is the one member of an object."""
    parsed = parse_arguments(arguments)
    return parsed if isinstance(parsed, dict) else {INVALID_JSON: arguments}
