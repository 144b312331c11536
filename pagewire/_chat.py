"""Conversations: turns, tools and chat options, as values."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call by the model."""

    id: str  # repeat it as tool_call_id of the result's turn
    name: str
    arguments: str  # JSON object as the model wrote it; incomplete if the output was cut


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of a tool call; the first piece of each call has its id and name."""

    index: int  # index of the call in the output
    id: str
    name: str
    arguments: str  # further characters of the arguments


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation."""

    role: str
    content: str = ""  # may be empty only with tool_calls
    name: str | None = None  # of the speaker, if the model's template uses it
    reasoning: str | None = None  # the assistant's reasoning before this turn
    tool_calls: Sequence[ToolCall] = ()  # by the assistant
    tool_call_id: str | None = None  # the call that a turn of role tool answers


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call.

    >>> Tool("get_weather", "Weather of a city.", {"type": "object", "properties": {}}).name
    'get_weather'
    """

    name: str
    description: str | None = None  # for the model
    parameters: Mapping[str, Any] | None = None  # JSON schema of the arguments
    strict: bool | None = None  # enforce the schema when a call is required


Messages = str | Sequence[Message | Mapping[str, object]]
Tools = Sequence[Tool | Mapping[str, object]]
# A tool, or a mapping that names one in OpenAI's form: call this one.
ToolChoice = Literal["none", "auto", "required"] | Tool | Mapping[str, object]


class ChatOptions(TypedDict, total=False):
    """Keyword arguments of calls with a conversation. None leaves the choice to the server.

    `tools` are functions that the model may call, `tool_choice` selects whether it calls them, and
    `parallel_tool_calls` whether more than once. `include_reasoning` returns the reasoning of
    models that reason; `reasoning_effort` is how much they do (`"none"` to `"max"`). The others
    control how the model's template renders the conversation: its variables, whether the
    assistant's turn is opened at the end, or whether the output continues the last turn.
    """

    tools: Tools
    tool_choice: ToolChoice | None
    parallel_tool_calls: bool | None
    include_reasoning: bool | None
    reasoning_effort: str | None
    chat_template_kwargs: Mapping[str, Any] | None
    add_generation_prompt: bool | None
    continue_final_message: bool | None
