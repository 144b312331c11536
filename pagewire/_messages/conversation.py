"""Converts conversations, tools and chat options to messages."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pagewire._chat import ChatOptions, Message, Messages, Tool, ToolCall, ToolChoice
from pagewire._errors import InvalidArgument
from pagewire._messages import openai_form
from pagewire._messages.fields import set_fields
from pagewire.v1 import inference_pb2 as pb

TOOL_MODE: Mapping[str, pb.ToolMode] = {
    "none": pb.TOOL_MODE_NONE,
    "auto": pb.TOOL_MODE_AUTO,
    "required": pb.TOOL_MODE_REQUIRED,
}

_SINGLE = (
    "parallel_tool_calls",
    "include_reasoning",
    "reasoning_effort",
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
    set_fields(made, {name: options.get(name) for name in _SINGLE})
    made.tools.extend(
        _to_tool(f"tools[{i}]", tool) for i, tool in enumerate(options.get("tools") or ())
    )
    variables = options.get("chat_template_kwargs")
    _set_choice(made, options.get("tool_choice"))
    if variables is not None:
        made.chat_template_kwargs_json = _to_json("chat_template_kwargs", variables)
    return made if made.ListFields() else None


def _set_choice(made: pb.ChatOptions, choice: ToolChoice | None) -> None:
    if choice is None:
        return
    if isinstance(choice, Tool | Mapping):
        name = choice.name if isinstance(choice, Tool) else openai_form.to_chosen_name(choice)
        made.tool_mode, made.required_tool = pb.TOOL_MODE_REQUIRED, name
    elif choice in TOOL_MODE:
        made.tool_mode = TOOL_MODE[choice]
    else:
        raise InvalidArgument(f"tool_choice: {choice!r} is no Tool and none of {[*TOOL_MODE]}")


def _to_message(place: str, message: object) -> pb.ChatMessage:
    if not isinstance(message, Message):
        message = openai_form.to_message(place, message)
    made = pb.ChatMessage()
    for name in _TEXTS:
        text = getattr(message, name)
        if isinstance(text, str):
            setattr(made, name, text)
        elif text is not None or name == "role" or (name == "content" and not message.tool_calls):
            raise InvalidArgument(f"{place}.{name}: needs a string")
    calls = message.tool_calls
    if not isinstance(calls, Sequence) or not all(isinstance(call, ToolCall) for call in calls):
        raise InvalidArgument(f"{place}.tool_calls: needs a sequence of ToolCall")
    for index, call in enumerate(calls):
        called = {"id": call.id, "name": call.name, "arguments": call.arguments}
        set_fields(made.tool_calls.add(), called, name=f"{place}.tool_calls[{index}]")
    return made


def _to_tool(place: str, tool: object) -> pb.Tool:
    if not isinstance(tool, Tool):
        tool = openai_form.to_tool(place, tool)
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
