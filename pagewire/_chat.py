"""Conversations: turns, tools and chat options, as values and as messages."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypedDict

from pagewire._errors import InvalidArgument
from pagewire._messages.fields import set_fields
from pagewire.v1 import inference_pb2 as pb


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
ToolChoice = Literal["none", "auto", "required"] | Tool  # a tool: call this one

TOOL_MODE: Mapping[str, pb.ToolMode] = {
    "none": pb.TOOL_MODE_NONE,
    "auto": pb.TOOL_MODE_AUTO,
    "required": pb.TOOL_MODE_REQUIRED,
}


class ChatOptions(TypedDict, total=False):
    """Keyword arguments of calls with a conversation. None leaves the choice to the server.

    `tools` are functions that the model may call, `tool_choice` selects whether it calls them, and
    `parallel_tool_calls` whether more than once. `include_reasoning` returns the reasoning of
    models that reason. The others control how the model's template renders the conversation: its
    variables, whether the assistant's turn is opened at the end, or whether the output continues
    the last turn.
    """

    tools: Sequence[Tool]
    tool_choice: ToolChoice | None
    parallel_tool_calls: bool | None
    include_reasoning: bool | None
    chat_template_kwargs: Mapping[str, Any] | None
    add_generation_prompt: bool | None
    continue_final_message: bool | None


_FLAGS = (
    "parallel_tool_calls",
    "include_reasoning",
    "add_generation_prompt",
    "continue_final_message",
)
_TEXTS = ("role", "content", "name", "reasoning", "tool_call_id")


def to_messages(messages: Messages) -> list[pb.ChatMessage]:
    """A conversation as messages; a string is one turn of the user."""
    if isinstance(messages, str):
        return [pb.ChatMessage(role="user", content=messages)]
    return [_to_message(f"messages[{i}]", message) for i, message in enumerate(messages)]


def to_chat_options(options: ChatOptions) -> pb.ChatOptions | None:
    """Chat options as a message; None if there are none. Other keywords are ignored."""
    made = pb.ChatOptions()
    set_fields(made, {name: options.get(name) for name in _FLAGS})
    made.tools.extend(
        _to_tool(f"tools[{i}]", tool) for i, tool in enumerate(options.get("tools") or ())
    )
    choice, variables = options.get("tool_choice"), options.get("chat_template_kwargs")
    if isinstance(choice, Tool):
        made.tool_mode, made.required_tool = pb.TOOL_MODE_REQUIRED, choice.name
    elif choice is not None:
        if choice not in TOOL_MODE:
            raise InvalidArgument(f"tool_choice: {choice!r} is no Tool and none of {[*TOOL_MODE]}")
        made.tool_mode = TOOL_MODE[choice]
    if variables is not None:
        made.chat_template_kwargs_json = _to_json("chat_template_kwargs", variables)
    return made if made.ListFields() else None


def _to_message(place: str, message: Message | Mapping[str, object]) -> pb.ChatMessage:
    if isinstance(message, Message):
        message = {field.name: getattr(message, field.name) for field in fields(message)}
    if unknown := sorted(message.keys() - {*_TEXTS, "tool_calls"}):
        raise InvalidArgument(f"{place}.{unknown[0]}: not supported")
    made, calls = pb.ChatMessage(), message.get("tool_calls") or ()
    for name in _TEXTS:
        text = message.get(name)
        if isinstance(text, str):
            setattr(made, name, text)
        elif text is not None or name == "role" or (name == "content" and not calls):
            raise InvalidArgument(f"{place}.{name}: needs a string")
    if not isinstance(calls, Sequence) or not all(isinstance(call, ToolCall) for call in calls):
        raise InvalidArgument(f"{place}.tool_calls: needs a sequence of ToolCall")
    made.tool_calls.extend(
        pb.ToolCall(id=call.id, name=call.name, arguments=call.arguments) for call in calls
    )
    return made


def _to_tool(place: str, tool: Tool) -> pb.Tool:
    if not isinstance(tool, Tool):
        raise InvalidArgument(f"{place}: needs a Tool")
    made = pb.Tool()
    for name in ("name", "description", "strict"):
        set_fields(made, {name: getattr(tool, name)}, name=f"{place}.{name}")
    if tool.parameters is not None:
        made.parameters_json = _to_json(f"{place}.parameters", tool.parameters)
    return made


def _to_json(place: str, value: Mapping[str, Any]) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"{place}: is not JSON ({error})") from None
