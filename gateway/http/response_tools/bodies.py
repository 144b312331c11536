"""The tools of a body of POST /v1/responses, and what the model is told of them.

Calls here are JSON. So a custom tool, whose input is free text, is a function with one text for the
model; a function in a namespace has both names. `CalledTool` says how a call of it is told.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, PlainValidator, ValidationError, WithJsonSchema

from gateway.chat.conversation import Tool, ToolChoice, ToolMode, ToolPlaces
from gateway.errors import limits
from gateway.errors.request_errors import invalid, unsupported
from gateway.http import fields
from gateway.http.hosted_tools import HostedTool, is_hosted, left_out
from gateway.http.messages import Strict, check_list, parse_choice
from gateway.http.response_tools.input_text import INPUT

KINDS = ("function", "custom", "namespace")


class ResponseToolBody(Strict):
    """A tool, with what clients copy from elsewhere."""

    harmless: ClassVar[Collection[str]] = fields.COPIED
    where: ClassVar[str | None] = "tools[]."


class FunctionTool(ResponseToolBody):
    """A function in this API's form, without a wrapper."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def to_tool(self, name: str, path: str) -> Tool:
        """The tool as a value of the gateway; `path` is its place in the body."""
        places = ToolPlaces(f"{path}.name", f"{path}.parameters")
        return Tool(name, self.description, self.parameters, bool(self.strict), places)


class InputFormat(ResponseToolBody):
    """The form of a custom tool's input."""

    type: Literal["text", "grammar"]
    syntax: Literal["regex"] | None = None
    definition: str | None = None


class TextTool(ResponseToolBody):
    """A tool whose input is text."""

    type: Literal["custom"]
    name: str
    description: str | None = None
    format: InputFormat | None = None

    def to_tool(self, name: str, path: str) -> Tool:
        """A function whose calls hold to its schema, so that each has its one text."""
        text: dict[str, Any] = {"type": "string", "description": "The input, as plain text."}
        if self.format is not None and self.format.type == "grammar":
            text["pattern"] = f"^(?:{self.format.definition or ''})$"
        parameters = {
            "type": "object",
            "properties": {INPUT: text},
            "required": [INPUT],
            "additionalProperties": False,
        }
        places = ToolPlaces(f"{path}.name", f"{path}.format.definition")
        return Tool(name, self.description, parameters, is_strict=True, places=places)


class NamespaceTool(ResponseToolBody):
    """Tools under one name."""

    type: Literal["namespace"]
    name: str
    description: str | None = None
    tools: list[FunctionTool | TextTool]


ResponseTool = FunctionTool | TextTool | NamespaceTool
AnyTool = ResponseTool | HostedTool
_BODIES: Mapping[str, type[ResponseTool]] = {
    "function": FunctionTool,
    "custom": TextTool,
    "namespace": NamespaceTool,
}


@dataclass(frozen=True, slots=True)
class CalledTool:
    """The form in which calls of a tool are told."""

    name: str
    namespace: str | None = None
    is_custom: bool = False

    @property
    def full_name(self) -> str:
        """The name for the model."""
        return self.name if self.namespace is None else f"{self.namespace}.{self.name}"


Leaf = tuple[str, CalledTool, FunctionTool | TextTool]


def _leaves(tools: Sequence[AnyTool]) -> Iterator[Leaf]:
    """The tools that can be called, each with its place in the body."""
    for index, tool in enumerate(tools):
        path = f"tools[{index}]"
        if isinstance(tool, HostedTool):
            continue
        if not isinstance(tool, NamespaceTool):
            yield path, CalledTool(tool.name, None, isinstance(tool, TextTool)), tool
            continue
        for place, inner in enumerate(tool.tools):
            called = CalledTool(inner.name, tool.name, isinstance(inner, TextTool))
            yield f"{path}.tools[{place}]", called, inner


def to_tools(tools: Sequence[AnyTool]) -> tuple[Tool, ...]:
    """The tools as values of the gateway."""
    return tuple(tool.to_tool(called.full_name, path) for path, called, tool in _leaves(tools))


def is_left_out(tool: AnyTool) -> bool:
    """True if the model is not told of the tool."""
    return isinstance(tool, HostedTool)


def called_tools(tools: Sequence[AnyTool]) -> dict[str, CalledTool]:
    """The forms in which calls are told, by the name that the model calls."""
    return {called.full_name: called for _, called, _ in _leaves(tools)}


def _parse_tools(tools: Any) -> Any:
    return _parsed("tools", tools, KINDS)


def _parsed(path: str, tools: Any, kinds: Sequence[str]) -> Any:
    """Tools by their type. Raises RequestError naming the one at fault."""
    if not isinstance(tools, list):
        return tools
    hosted = {kind for kind in map(_kind_of, tools) if is_hosted(kind)} if kinds is KINDS else ()
    check_list(path, tools, limits.MAX_TOOLS, *kinds, *hosted)
    return [_parse_tool(f"{path}[{index}]", tool) for index, tool in enumerate(tools)]


def _kind_of(tool: Any) -> Any:
    return tool.get("type") if isinstance(tool, dict) else None


def _parse_tool(path: str, tool: Any) -> AnyTool:
    kind = _kind_of(tool)
    if not isinstance(kind, str):
        raise invalid(f"{path}.type", f"is missing, must be one of {', '.join(KINDS)}")
    if is_hosted(kind):
        return left_out(path, tool)
    if kind == "namespace":
        tool = tool | {"tools": _parsed(f"{path}.tools", tool.get("tools"), KINDS[:2])}
    if kind == "custom":
        _check_format(f"{path}.format", tool.get("format"))
    try:
        return _BODIES[kind].model_validate(tool)
    except ValidationError as error:
        raise fields.refusal(error.errors()[0], path) from error


def _check_format(path: str, asked: Any) -> None:
    """Raises RequestError for a grammar that the input cannot be held to."""
    if not isinstance(asked, dict) or asked.get("type") != "grammar":
        return
    if asked.get("syntax") != "regex":
        problem = "must be 'regex': the model writes the input as a text in JSON"
        raise unsupported(f"{path}.syntax", problem)
    if asked.get("definition") is None:
        raise invalid(f"{path}.definition", "is missing")


ResponseTools = Annotated[
    list[FunctionTool | TextTool | NamespaceTool | HostedTool],
    BeforeValidator(_parse_tools, json_schema_input_type=list[ResponseTool]),
]

_CHOICE_SCHEMA = {
    "anyOf": [
        {"type": "string", "enum": [mode.value for mode in ToolMode]},
        {
            "type": "object",
            "properties": {"type": {"enum": ["function", "custom"]}, "name": {"type": "string"}},
            "required": ["type", "name"],
        },
    ]
}


def _parse_choice(value: Any) -> ToolChoice:
    """As in chats; a custom tool is chosen like a function."""
    if isinstance(value, Mapping) and value.get("type") == "custom":
        value = {**value, "type": "function"}
    return parse_choice(value)


ResponseChoice = Annotated[
    ToolChoice, PlainValidator(_parse_choice), WithJsonSchema(_CHOICE_SCHEMA)
]
