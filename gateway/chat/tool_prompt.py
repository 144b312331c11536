"""Tools for models whose chat template knows none: the conversation says it in plain words.

The tools stand in the system's turn, or in the first turn where the template knows no system. Calls
and their results become text in the form that the prompt asks for, which the parser `hermes` reads.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from gateway.chat.conversation import Message, Tool, parse_arguments
from gateway.chat.turns import INSTRUCTING

_INTRODUCTION = """You can call these functions. Each line is one, with the JSON schema of its \
arguments:
<tools>
{tools}
</tools>
To call a function, write its name and arguments as JSON between tags, once for each call:
<tool_call>
{{"name": "function_name", "arguments": {{"argument": "value"}}}}
</tool_call>
The results come back between <tool_response> tags. Answer in plain text where no function helps."""


def in_plain_words(
    messages: Sequence[Message], tools: Sequence[Tool], *, has_system: bool
) -> tuple[Message, ...]:
    """The turns for a template that renders neither tools, nor calls and results."""
    plain = [_plain(message) for message in messages]
    if tools:
        prompt = _INTRODUCTION.format(tools="\n".join(map(_line, tools)))
        first = plain[0]
        if first.role in INSTRUCTING or not has_system:
            text = f"{first.content}\n\n{prompt}" if has_system else f"{prompt}\n\n{first.content}"
            plain[0] = replace(first, content=text)
        else:
            plain.insert(0, Message("system", prompt))
    return tuple(plain)


def _line(tool: Tool) -> str:
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    function["parameters"] = tool.parameters or {"type": "object", "properties": {}}
    return json.dumps(function, ensure_ascii=False)


def _plain(message: Message) -> Message:
    """A turn without calls; the result of a call becomes a turn of the user."""
    if message.role == "tool":
        text = f"<tool_response>\n{message.content or ''}\n</tool_response>"
        return Message("user", text)
    if not message.tool_calls:
        return message
    calls = [
        {"name": call.name, "arguments": parse_arguments(call.arguments)}
        for call in message.tool_calls
    ]
    texts = [f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>" for call in calls]
    content = "\n".join(filter(None, [message.content, *texts]))
    return replace(message, content=content, tool_calls=())
