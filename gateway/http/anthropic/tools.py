"""The tools of a body of the Messages API, and the choice among them."""

from collections.abc import Collection, Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ValidationError

from gateway.chat.conversation import Tool, ToolChoice, ToolMode, ToolPlaces
from gateway.errors import limits
from gateway.errors.request_errors import invalid, unsupported
from gateway.http import fields
from gateway.http.hosted_tools import HostedTool, is_hosted, left_out
from gateway.http.messages import Strict

_MODES = {
    "auto": ToolMode.AUTO,
    "any": ToolMode.REQUIRED,
    "tool": ToolMode.REQUIRED,
    "none": ToolMode.NONE,
}


class CustomTool(Strict):
    """A tool that the caller runs; one whose loading is deferred is a tool like the others."""

    neutral: ClassVar[fields.Neutral] = {"allowed_callers": (["direct"],)}
    harmless: ClassVar[Collection[str]] = fields.COPIED | {"eager_input_streaming", "defer_loading"}
    where: ClassVar[str | None] = "tools[]."

    type: Literal["custom"] = "custom"
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    input_examples: list[dict[str, Any]] | None = None
    strict: bool | None = None

    def to_tool(self, path: str) -> Tool:
        """The tool as a value of the gateway; `path` is its place in the body."""
        schema = self.input_schema
        if self.input_examples:
            schema = {**schema, "examples": self.input_examples}
        places = ToolPlaces(f"{path}.name", f"{path}.input_schema")
        return Tool(self.name, self.description, schema, bool(self.strict), places)


AnyTool = CustomTool | HostedTool
Placed = tuple[str, CustomTool]  # the tool's place in the body, and the tool


def _parse_tools(tools: Any) -> Any:
    """Tools by their type. Raises RequestError naming the one at fault."""
    if not isinstance(tools, list):
        return tools
    limits.check_count("tools", len(tools), limits.MAX_TOOLS)
    return [_parse_tool(f"tools[{index}]", tool) for index, tool in enumerate(tools)]


def _parse_tool(path: str, tool: Any) -> AnyTool:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if is_hosted(kind):
        return left_out(path, tool)
    if isinstance(kind, str) and kind != "custom":
        problem = f"{kind[:64]!r} is not supported by this model, only 'custom'"
        raise unsupported(f"{path}.type", problem)
    return validated_tool(tool, path)


def validated_tool(tool: Any, path: str) -> CustomTool:
    """The tool as a model. Raises RequestError naming the place below `path`."""
    try:
        return CustomTool.model_validate(tool)
    except ValidationError as error:
        raise fields.refusal(error.errors()[0], path) from error


Tools = Annotated[
    list[CustomTool | HostedTool],
    BeforeValidator(_parse_tools, json_schema_input_type=list[CustomTool]),
]


def to_tools(tools: Sequence[BaseModel], later: Sequence[Placed]) -> Iterator[Tool]:
    """The tools of a body, and those that its turns define later under names of their own."""
    names: set[str] = set()
    for index, tool in enumerate(tools):
        if isinstance(tool, CustomTool):
            names.add(tool.name)
            yield tool.to_tool(f"tools[{index}]")
    for path, tool in later:
        if tool.name not in names:
            names.add(tool.name)
            yield tool.to_tool(path)


class ChoiceBody(Strict):
    """The choice between calling tools and answering in words."""

    where: ClassVar[str | None] = "tool_choice."

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    def to_choice(self) -> ToolChoice:
        """The choice as a value of the gateway. Raises RequestError."""
        if (self.name is not None) != (self.type == "tool"):
            raise invalid("tool_choice.name", 'belongs to type "tool", which needs it')
        return ToolChoice(_MODES[self.type], self.name)
