"""Turns, tools and tool choices in OpenAI's form, and their conversion."""

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, PlainValidator
from pydantic import WithJsonSchema as JsonSchema

from gateway import limits
from gateway.chat.conversation import Message, Tool, ToolCall, ToolChoice, ToolMode
from gateway.errors import invalid, unsupported
from gateway.http import fields


class Strict(BaseModel):
    """A JSON object without other fields, and with strict types."""

    model_config = ConfigDict(extra="forbid", strict=True)


class TextPart(Strict):
    """A piece of a turn."""

    type: Literal["text"]
    text: str


class CalledFunction(Strict):
    """The function of a tool call; arguments are a JSON object, written as a string."""

    name: str
    arguments: str


class ToolCallBody(Strict):
    """A tool call by the assistant in an earlier turn."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction

    def to_call(self) -> ToolCall:
        """The call as a value of the gateway."""
        return ToolCall(self.id, self.function.name, self.function.arguments)


def _as_parts(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


Content = Annotated[
    list[TextPart] | None,
    BeforeValidator(_as_parts, json_schema_input_type=str | list[TextPart] | None),
]


class ChatMessage(Strict):
    """One turn. Text parts are joined with newlines."""

    role: str
    content: Content = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # another name of the same field
    tool_calls: list[ToolCallBody] | None = None
    tool_call_id: str | None = None

    def to_message(self) -> Message:
        """The turn with its parts joined."""
        content = None
        if self.content is not None:
            content = "\n".join(part.text for part in self.content)
        return Message(
            role=self.role,
            content=content,
            name=self.name,
            reasoning=self.reasoning if self.reasoning_content is None else self.reasoning_content,
            tool_calls=tuple(call.to_call() for call in self.tool_calls or ()),
            tool_call_id=self.tool_call_id,
        )


def _strip_messages(messages: Any) -> Any:
    """The turns without neutral fields. Raises RequestError naming content that is not text."""
    if not isinstance(messages, list):
        return messages
    limits.check_count("messages", len(messages), limits.MAX_MESSAGES)
    stripped = []
    for index, message in enumerate(messages):
        path = f"messages[{index}]."
        stripped.append(fields.strip(message, fields.MESSAGE, path))
        if isinstance(message, dict):
            check_list(f"{path}content", message.get("content"), limits.MAX_CONTENT_PARTS, "text")
            calls = message.get("tool_calls")
            check_list(f"{path}tool_calls", calls, limits.MAX_TOOL_CALLS, "function")
    return stripped


def check_list(path: str, entries: Any, limit: int, known: str) -> None:
    """Raises RequestError for too many entries, and for types other than `known`."""
    if not isinstance(entries, list):
        return
    limits.check_count(path, len(entries), limit)
    for index, entry in enumerate(entries):
        kind = entry.get("type") if isinstance(entry, dict) else None
        if isinstance(kind, str) and kind != known:
            problem = f"{kind[:64]!r} is not supported by this model, only {known!r} is"
            raise unsupported(f"{path}[{index}].type", problem)


Messages = Annotated[list[ChatMessage], BeforeValidator(_strip_messages)]


class FunctionBody(Strict):
    """A function; its parameters are a JSON schema."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolBody(Strict):
    """A tool; only functions are supported."""

    type: Literal["function"]
    function: FunctionBody

    def to_tool(self) -> Tool:
        """The tool as a value of the gateway."""
        function = self.function
        is_strict = bool(function.strict)
        return Tool(function.name, function.description, function.parameters, is_strict)


def _check_tools(tools: Any) -> Any:
    check_list("tools", tools, limits.MAX_TOOLS, "function")
    return tools


Tools = Annotated[list[ToolBody], BeforeValidator(_check_tools)]


_MODES = frozenset(mode.value for mode in ToolMode)


def parse_choice(value: Any) -> ToolChoice:
    """A mode, or the one function that must be called. Raises RequestError."""
    if isinstance(value, str) and value in _MODES:
        return ToolChoice(ToolMode(value))
    if not isinstance(value, Mapping) or "type" not in value:
        problem = 'must be "none", "auto", "required" or {"type": "function", "function": {...}}'
        raise invalid("tool_choice", problem)
    if value["type"] != "function":
        raise unsupported("tool_choice.type", "only 'function' is supported by this server")
    function = value.get("function")
    if (
        set(value) != {"type", "function"}
        or not isinstance(function, Mapping)
        or set(function) != {"name"}
        or not isinstance(function["name"], str)
    ):
        raise invalid("tool_choice", 'must be {"type": "function", "function": {"name": ...}}')
    return ToolChoice(ToolMode.REQUIRED, function["name"])


_NAME_SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
_CHOICE_SCHEMA = {
    "anyOf": [
        {"type": "string", "enum": sorted(_MODES)},
        {
            "type": "object",
            "properties": {"type": {"const": "function"}, "function": _NAME_SCHEMA},
            "required": ["type", "function"],
        },
    ]
}
Choice = Annotated[ToolChoice, PlainValidator(parse_choice), JsonSchema(_CHOICE_SCHEMA)]


HEADERS = ("authorization", "content-encoding", "x-tenant", "x-priority", "x-timeout-s", "body")


@cache
def field_names() -> frozenset[str]:
    """Every name that a field of a body has, supported or not, and the headers: for logs."""
    tables = (fields.HARMLESS, fields.CHAT, fields.COMPLETION, fields.EMBEDDING)
    found = {*HEADERS, *(name for table in tables for name in table)}
    for body in _subclasses(Strict):
        found |= {field.alias or name for name, field in body.model_fields.items()}
    return frozenset(found)


def _subclasses(kind: type[Strict]) -> Iterator[type[Strict]]:
    for sub in kind.__subclasses__():
        yield sub
        yield from _subclasses(sub)
