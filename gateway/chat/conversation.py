"""Conversations: turns, tools, and how they are rendered for the model."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from gateway import limits
from gateway.errors import invalid, unsupported


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
class Tool:
    """A function that the model may call; the parameters are a JSON schema."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None
    is_strict: bool = False  # arguments must match the schema


class ToolMode(Enum):
    """Whether the model calls tools."""

    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether the model calls tools, and which one it must call if it is one."""

    mode: ToolMode = ToolMode.AUTO
    name: str | None = None  # only with REQUIRED


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
        """Whether the model begins a new turn."""
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
    def usable_tools(self) -> tuple[Tool, ...]:
        """The tools that the model may use."""
        return () if self.tool_choice.mode is ToolMode.NONE else self.tools


def _check_message(path: str, message: Message) -> None:
    limits.check_bytes(f"{path}.role", message.role, limits.MAX_ROLE_BYTES)
    if not message.role:
        raise invalid(f"{path}.role", "is empty")
    if message.content is None and not message.tool_calls:
        raise invalid(f"{path}.content", "may be left out only with tool_calls")
    limits.utf8(f"{path}.content", message.content or "")
    limits.check_count(f"{path}.tool_calls", len(message.tool_calls), limits.MAX_TOOL_CALLS)
    for index, call in enumerate(message.tool_calls):
        _check_name(f"{path}.tool_calls[{index}].function.name", call.name)
        parse_arguments(f"{path}.tool_calls[{index}].function.arguments", call.arguments)


def _check_tools(tools: tuple[Tool, ...], choice: ToolChoice) -> None:
    limits.check_count("tools", len(tools), limits.MAX_TOOLS)
    names: set[str] = set()
    for index, tool in enumerate(tools):
        path = f"tools[{index}].function.name"
        _check_name(path, tool.name)
        if tool.name in names:
            raise invalid(path, f"{tool.name!r} is the name of two tools")
        names.add(tool.name)
        if tool.is_strict and choice.mode is not ToolMode.REQUIRED:
            problem = "a call is held to its schema only where tool_choice requires one"
            raise unsupported(f"tools[{index}].function.strict", problem)
    if choice.mode is ToolMode.REQUIRED and not tools:
        raise invalid("tool_choice", "is only allowed with tools")
    if choice.name is not None and choice.name not in names:
        raise invalid("tool_choice", f"{choice.name[:64]!r} is not among the tools")


def _check_name(path: str, name: str) -> None:
    limits.check_bytes(path, name, limits.MAX_TOOL_NAME_BYTES)
    if not name:
        raise invalid(path, "is empty")


def parse_arguments(path: str, arguments: str) -> dict[str, Any]:
    """A call's arguments as templates expect them. Raises RequestError unless an object."""
    try:
        parsed = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        raise invalid(path, "is not a JSON object")
    return parsed
