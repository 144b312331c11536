"""Turns, tools and tool choices in OpenAI's form, and their conversion."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    GetCoreSchemaHandler,
    PlainValidator,
    ValidationError,
    model_validator,
)
from pydantic import WithJsonSchema as JsonSchema
from pydantic_core import CoreSchema

from gateway.chat.conversation import Message, Tool, ToolCall, ToolChoice, ToolMode, ToolPlaces
from gateway.errors import limits
from gateway.errors.request_errors import invalid, unsupported
from gateway.http import counted, fields, media
from gateway.http.hosted_tools import HostedTool, is_hosted, left_out, refuse_choice
from gateway.text.unicode import to_json


class Strict(BaseModel):
    """A JSON object of strict types; fields that ask for nothing are accepted and dropped."""

    model_config = ConfigDict(extra="forbid", strict=True)

    neutral: ClassVar[fields.Neutral] = {}
    harmless: ClassVar[Collection[str]] = frozenset()
    # Precedes the names of unknown fields in notices; None: they are refused, and not ignored.
    where: ClassVar[str | None] = None

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """The schema of the fields, with bounds for what is in them."""
        schema = handler(source)
        counted.bound(cast(dict[str, Any], handler.resolve_ref_schema(schema)))
        return schema

    @model_validator(mode="before")
    @classmethod
    def _accept(cls, body: Any) -> Any:
        if isinstance(body, dict) and len(body) > counted.MAX_FIELDS:
            counted.count_fields(body)
        return fields.accepted(body, _names_of(cls), cls.neutral, cls.harmless, cls.where)


@cache
def _names_of(kind: type[BaseModel]) -> frozenset[str]:
    return frozenset(field.alias or name for name, field in kind.model_fields.items())


TEXT_KINDS = ("text", "input_text", "output_text", "refusal", "thinking", "reasoning_text")


class TextPart(Strict):
    """A piece of a turn; its text stands under one of three names."""

    harmless: ClassVar[Collection[str]] = fields.COPIED
    where: ClassVar[str | None] = "messages[].content[]."

    type: str
    text: str | None = None
    refusal: str | None = None
    thinking: str | None = None

    @model_validator(mode="after")
    def _check(self) -> "TextPart":
        texts = (self.text, self.refusal, self.thinking)
        if sum(text is not None for text in texts) != 1:
            raise ValueError("must hold one text")
        return self

    @property
    def content(self) -> str:
        """The text, under whichever name it came."""
        return self.text or self.refusal or self.thinking or ""

    @property
    def is_thought(self) -> bool:
        """True if it is reasoning, and no content."""
        return self.type in ("thinking", "reasoning_text")


def _written(arguments: Any) -> Any:
    """Arguments as text; clients of other servers send the object itself."""
    return to_json(arguments) if isinstance(arguments, dict) else arguments


Arguments = Annotated[str, BeforeValidator(_written, json_schema_input_type=str | dict[str, Any])]


class CalledFunction(Strict):
    """The function of a tool call; arguments are what the model wrote, by rights a JSON object."""

    harmless: ClassVar[Collection[str]] = fields.COPIED
    where: ClassVar[str | None] = "messages[].tool_calls[].function."

    name: str
    arguments: Arguments = ""


class ToolCallBody(Strict):
    """A tool call by the assistant in an earlier turn."""

    harmless: ClassVar[Collection[str]] = fields.COPIED
    where: ClassVar[str | None] = "messages[].tool_calls[]."

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction

    def to_call(self) -> ToolCall:
        """The call as a value of the gateway."""
        return ToolCall(self.id, self.function.name, self.function.arguments)


def _as_parts(value: Any) -> Any:
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list):
        return value
    return [{"type": "text", "text": part} if isinstance(part, str) else part for part in value]


Content = Annotated[
    list[TextPart] | None,
    BeforeValidator(_as_parts, json_schema_input_type=str | list[TextPart | str] | None),
]


class ChatMessage(Strict):
    """One turn. Text parts are joined with newlines."""

    neutral: ClassVar[fields.Neutral] = fields.MESSAGE
    harmless: ClassVar[Collection[str]] = fields.COPIED
    where: ClassVar[str | None] = "messages[]."

    role: str
    content: Content = None
    refusal: str | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # another name of the same field
    tool_calls: list[ToolCallBody] | None = None
    tool_call_id: str | None = None

    def to_message(self) -> Message:
        """The turn with its parts joined; a refusal is the content of a turn without another."""
        return Message(
            role=self.role,
            content=self.refusal if not self.content else self._joined(is_thought=False) or "",
            name=self.name,
            reasoning=self._reasoning(),
            tool_calls=tuple(call.to_call() for call in self.tool_calls or ()),
            tool_call_id=self.tool_call_id,
        )

    def _reasoning(self) -> str | None:
        if self.reasoning_content is not None:
            return self.reasoning_content
        return self._joined(is_thought=True) if self.reasoning is None else self.reasoning

    def _joined(self, *, is_thought: bool) -> str | None:
        """The parts of one kind; None where there is none."""
        parts = [part for part in self.content or () if part.is_thought is is_thought]
        return "\n".join(part.content for part in parts) if parts else None


def _check_messages(messages: Any) -> Any:
    """The turns without parts that hold nothing. Raises RequestError naming what is no text."""
    if not isinstance(messages, list):
        return messages
    limits.check_count("messages", len(messages), limits.MAX_MESSAGES)
    return [_checked(f"messages[{index}].", message) for index, message in enumerate(messages)]


def _checked(path: str, message: Any) -> Any:
    if not isinstance(message, dict):
        return message
    check_list(f"{path}tool_calls", message.get("tool_calls"), limits.MAX_TOOL_CALLS, "function")
    content = message.get("content")
    if not isinstance(content, list):
        return message
    limits.check_count(f"{path}content", len(content), limits.MAX_CONTENT_PARTS)
    return message | {"content": media.readable(f"{path}content", content, TEXT_KINDS)}


def check_list(path: str, entries: Any, limit: int, *known: str) -> None:
    """Raises RequestError for too many entries, and for types other than the `known` ones."""
    if not isinstance(entries, list):
        return
    limits.check_count(path, len(entries), limit)
    for index, entry in enumerate(entries):
        kind = entry.get("type") if isinstance(entry, dict) else None
        if isinstance(kind, str) and kind not in known:
            supported = " or ".join(map(repr, known))
            problem = f"{kind[:64]!r} is not supported by this model, only {supported}"
            raise unsupported(f"{path}[{index}].type", problem)


Messages = Annotated[list[ChatMessage], BeforeValidator(_check_messages)]


class FunctionBody(Strict):
    """A function; its parameters are a JSON schema."""

    harmless: ClassVar[Collection[str]] = fields.COPIED
    where: ClassVar[str | None] = "tools[].function."

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolBody(Strict):
    """A tool; only functions are supported."""

    harmless: ClassVar[Collection[str]] = fields.COPIED
    where: ClassVar[str | None] = "tools[]."

    type: Literal["function"]
    function: FunctionBody

    def to_tool(self, path: str) -> Tool:
        """The tool as a value of the gateway; `path` is its place in the body."""
        function = self.function
        places = ToolPlaces(f"{path}.name", f"{path}.parameters")
        is_strict = bool(function.strict)
        return Tool(function.name, function.description, function.parameters, is_strict, places)


def check_tools(tools: Any) -> Any:
    """The tools by their type. Raises RequestError for too many, and naming the one at fault."""
    if not isinstance(tools, list):
        return tools
    check_list("tools", tools, limits.MAX_TOOLS, "function", *_hosted(tools))
    return [_parse_tool(f"tools[{index}]", tool) for index, tool in enumerate(tools)]


def _hosted(tools: list[Any]) -> set[str]:
    kinds = (tool.get("type") for tool in tools if isinstance(tool, dict))
    return {kind for kind in kinds if isinstance(kind, str) and is_hosted(kind)}


def _parse_tool(path: str, tool: Any) -> Any:
    if isinstance(tool, dict) and is_hosted(tool.get("type")):
        return left_out(path, tool)
    try:
        return ToolBody.model_validate(tool)
    except ValidationError as error:
        raise fields.refusal(error.errors()[0], path) from error


Tools = Annotated[
    list[ToolBody | HostedTool],
    BeforeValidator(check_tools, json_schema_input_type=list[ToolBody]),
]


def to_tools(tools: Sequence[ToolBody | HostedTool]) -> tuple[Tool, ...]:
    """The tools that the model is told of, each with its place in the body."""
    return tuple(
        tool.to_tool(f"tools[{index}].function")
        for index, tool in enumerate(tools)
        if isinstance(tool, ToolBody)
    )


_MODES = frozenset(mode.value for mode in ToolMode)


def parse_choice(value: Any) -> ToolChoice:
    """A mode, the one function that must be called, or a mode with the allowed functions.

    Raises RequestError.
    """
    if isinstance(value, str) and value in _MODES:
        return ToolChoice(ToolMode(value))
    if not isinstance(value, Mapping) or "type" not in value:
        problem = 'must be "none", "auto", "required" or {"type": "function", "function": {...}}'
        raise invalid("tool_choice", problem)
    if value["type"] == "allowed_tools":
        return _parse_allowed(value.get("allowed_tools", value))
    refuse_choice("tool_choice.type", value["type"])
    if value["type"] != "function":
        raise unsupported("tool_choice.type", "only 'function' is supported by this server")
    return ToolChoice(ToolMode.REQUIRED, _function_name(value))


def _parse_allowed(value: Any) -> ToolChoice:
    """OpenAI's subset of the tools, in the form of chats or of responses."""
    place = "tool_choice.allowed_tools"
    mode = value.get("mode", "auto") if isinstance(value, Mapping) else None
    tools = value.get("tools") if isinstance(value, Mapping) else None
    if mode not in ("auto", "required") or not isinstance(tools, list) or not tools:
        raise invalid(place, 'must be {"mode": "auto" or "required", "tools": [...]}')
    limits.check_count(place, len(tools), limits.MAX_TOOLS)
    functions = [tool for tool in tools if not _is_left_out(tool)]
    if not functions:
        raise unsupported(place, "names only tools that would run on the server, which has none")
    names = tuple(_function_name(tool) for tool in functions)
    return ToolChoice(ToolMode(mode), allowed=names)


def _is_left_out(tool: Any) -> bool:
    return isinstance(tool, Mapping) and is_hosted(tool.get("type"))


def _function_name(value: Any) -> str:
    function = value.get("function", value) if isinstance(value, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise invalid("tool_choice", 'must be {"type": "function", "function": {"name": ...}}')
    return name


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
    tables = (fields.CHAT_HARMLESS, fields.CHAT, fields.COMPLETION, fields.EMBEDDING)
    found = {*HEADERS, *(name for table in tables for name in table)}
    for body in _subclasses(Strict):
        found |= {field.alias or name for name, field in body.model_fields.items()}
    return frozenset(found)


def _subclasses(kind: type[Strict]) -> Iterator[type[Strict]]:
    for sub in kind.__subclasses__():
        yield sub
        yield from _subclasses(sub)
