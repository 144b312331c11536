"""Converts between protobuf messages and chats."""

import json
from collections.abc import Sequence
from typing import Any

from gateway.chat.conversation import (
    Conversation,
    Message,
    Rendering,
    Tool,
    ToolCall,
    ToolChoice,
    ToolMode,
)
from gateway.chat.parts import CallArguments, CallStart, Content, Part, Reasoning, Reply
from gateway.chat.pictures import NO_PICTURES, PictureSource, given_pictures
from gateway.errors.request_errors import invalid, unsupported
from pagewire.v1 import inference_pb2 as pb

TOOL_MODE = {
    pb.TOOL_MODE_UNSPECIFIED: ToolMode.AUTO,
    pb.TOOL_MODE_NONE: ToolMode.NONE,
    pb.TOOL_MODE_AUTO: ToolMode.AUTO,
    pb.TOOL_MODE_REQUIRED: ToolMode.REQUIRED,
}


def conversation_from_proto(
    messages: Sequence[pb.ChatMessage], options: pb.ChatOptions
) -> Conversation:
    """The conversation from a gRPC client. Raises RequestError naming the field at fault."""
    return Conversation(
        messages=tuple(_message(f"messages[{n}]", message) for n, message in enumerate(messages)),
        tools=tuple(_tool(f"tools[{index}]", tool) for index, tool in enumerate(options.tools)),
        tool_choice=_tool_choice(options),
        parallel_tool_calls=_flag(options, "parallel_tool_calls") is not False,
        include_reasoning=_flag(options, "include_reasoning") is not False,
        max_reasoning_tokens=(
            options.thinking_token_budget if options.HasField("thinking_token_budget") else None
        ),
        rendering=Rendering(
            kwargs=_object("chat_template_kwargs_json", options.chat_template_kwargs_json or "{}"),
            add_generation_prompt=_flag(options, "add_generation_prompt"),
            continue_final_message=options.continue_final_message,
            reasoning_effort=(
                options.reasoning_effort if options.HasField("reasoning_effort") else None
            ),
        ),
    )


def _flag(options: pb.ChatOptions, name: str) -> bool | None:
    return getattr(options, name) if options.HasField(name) else None


def _message(path: str, message: pb.ChatMessage) -> Message:
    calls = tuple(ToolCall(call.id, call.name, call.arguments) for call in message.tool_calls)
    content = "\n".join([*_marks(f"{path}.picture_files", message), message.content])
    return Message(
        role=message.role,
        content=None if calls and not content else content,
        name=message.name if message.HasField("name") else None,
        reasoning=message.reasoning if message.HasField("reasoning") else None,
        tool_calls=calls,
        tool_call_id=message.tool_call_id if message.HasField("tool_call_id") else None,
    )


def _marks(path: str, message: pb.ChatMessage) -> list[str]:
    """The marks of a turn's pictures. Raises RequestError where none are taken."""
    given, files = given_pictures(), message.picture_files
    if files and given is None:
        raise unsupported(f"{path}[0]", NO_PICTURES)
    if given is None:
        return []
    return [
        given.add(PictureSource(f"{path}[{n}]", NO_PICTURES, content=content))
        for n, content in enumerate(files)
    ]


def _tool(path: str, tool: pb.Tool) -> Tool:
    parameters = None
    if tool.HasField("parameters_json"):
        parameters = _object(f"{path}.parameters_json", tool.parameters_json)
    description = tool.description if tool.HasField("description") else None
    return Tool(tool.name, description, parameters, tool.strict)


def _tool_choice(options: pb.ChatOptions) -> ToolChoice:
    mode = TOOL_MODE.get(options.tool_mode)
    if mode is None:
        raise invalid("tool_mode", f"{options.tool_mode} is not known")
    name = options.required_tool if options.HasField("required_tool") else None
    if name is not None and mode is not ToolMode.REQUIRED:
        raise invalid("required_tool", "is only allowed with TOOL_MODE_REQUIRED")
    return ToolChoice(mode, name)


def _object(field: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise invalid(field, "is not a JSON object")
    return value


def add_parts(delta: pb.OutputDelta, parts: Sequence[Part]) -> None:
    """Adds a piece of a chat's content, reasoning and calls to the message."""
    delta.text = "".join(part.text for part in parts if isinstance(part, Content))
    delta.reasoning = "".join(part.text for part in parts if isinstance(part, Reasoning))
    for part in parts:
        match part:
            case CallStart(index, call_id, name):
                delta.tool_calls.add(index=index, id=call_id, name=name)
            case CallArguments(index, text):
                delta.tool_calls.add(index=index, arguments=text)


def add_reply(output: pb.Output, reply: Reply) -> None:
    """Adds a chat's content, reasoning and calls to the message."""
    output.text = reply.content
    if reply.reasoning is not None:
        output.reasoning = reply.reasoning
    for call in reply.tool_calls:
        output.tool_calls.add(id=call.id, name=call.name, arguments=call.arguments)
