"""The body of POST /v1/responses, and its conversion to a chat."""

from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, PlainValidator, WithJsonSchema

from gateway import limits
from gateway.chat.conversation import (
    Conversation,
    Message,
    Rendering,
    Tool,
    ToolCall,
    ToolChoice,
    ToolMode,
)
from gateway.errors import invalid, unsupported
from gateway.generation import GenerationRequest, SamplingParams, check_range
from gateway.http import fields
from gateway.http.messages import Strict, check_list, parse_choice
from gateway.http.schema import Body, Neutral, StreamOptions
from gateway.http.structured import FORMATS
from gateway.structure.structure import ANY_OBJECT, JsonSchema, Structure
from wire.numbers import UINT32_MAX

# Fields of items that clients copy from an earlier answer; they have no effect.
_BOOKKEEPING = frozenset({"id", "status", "annotations", "logprobs"})


class TextItemPart(Strict):
    """A piece of a message, a result or reasoning."""

    type: Literal["input_text", "output_text", "reasoning_text"]
    text: str


def _as_parts(value: Any) -> Any:
    if isinstance(value, str):
        return [{"type": "input_text", "text": value}]
    if not isinstance(value, list):
        return value
    limits.check_count("input", len(value), limits.MAX_CONTENT_PARTS)
    return [_without_bookkeeping(part) for part in value]


def _without_bookkeeping(item: Any) -> Any:
    if not isinstance(item, dict):
        return item
    return {
        name: value
        for name, value in item.items()
        if name not in _BOOKKEEPING and value is not None and (name, value) != ("summary", [])
    }


TextParts = Annotated[
    list[TextItemPart],
    BeforeValidator(_as_parts, json_schema_input_type=str | list[TextItemPart]),
]


def _text_of(parts: list[TextItemPart]) -> str:
    return "\n".join(part.text for part in parts)


class MessageItem(Strict):
    """A turn."""

    type: Literal["message"] = "message"
    role: str
    content: TextParts


class CallItem(Strict):
    """A call by the model."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class ResultItem(Strict):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: str
    output: TextParts


class ReasoningItem(Strict):
    """Reasoning of the model in an earlier turn."""

    type: Literal["reasoning"]
    content: TextParts | None = None


Item = MessageItem | CallItem | ResultItem | ReasoningItem
_KINDS: dict[str, type[Item]] = {
    "message": MessageItem,
    "function_call": CallItem,
    "function_call_output": ResultItem,
    "reasoning": ReasoningItem,
}


def _parse_input(value: Any) -> Any:
    """Parses text as one turn of the user, and items by their type."""
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if not isinstance(value, list):
        return value
    limits.check_count("input", len(value), limits.MAX_MESSAGES)
    if not value:
        raise invalid("input", "is empty")
    return [_parse_item(f"input[{index}]", item) for index, item in enumerate(value)]


def _parse_item(path: str, item: Any) -> Any:
    kind = item.get("type", "message") if isinstance(item, dict) else None
    if not isinstance(kind, str) or kind not in _KINDS:
        raise unsupported(f"{path}.type", f"must be one of {', '.join(_KINDS)}")
    return _KINDS[kind].model_validate(_without_bookkeeping(item))


Input = Annotated[
    list[Item], BeforeValidator(_parse_input, json_schema_input_type=str | list[Item])
]


class FunctionTool(Strict):
    """A function in this API's form, without a wrapper."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def to_tool(self) -> Tool:
        """The tool as a value of the gateway."""
        return Tool(self.name, self.description, self.parameters, bool(self.strict))


def _check_tools(tools: Any) -> Any:
    check_list("tools", tools, limits.MAX_TOOLS, "function")
    return tools


def _parse_choice(value: Any) -> ToolChoice:
    """A mode, or the one function that must be called, without a wrapper. Raises RequestError."""
    if isinstance(value, dict) and set(value) == {"type", "name"}:
        value = {"type": value["type"], "function": {"name": value["name"]}}
    return parse_choice(value)


_CHOICE_SCHEMA = {
    "anyOf": [
        {"type": "string", "enum": [mode.value for mode in ToolMode]},
        {
            "type": "object",
            "properties": {"type": {"const": "function"}, "name": {"type": "string"}},
            "required": ["type", "name"],
        },
    ]
}


class ReasoningOptions(Strict):
    """The reasoning effort."""

    effort: str | None = None


class TextFormat(Strict):
    """The format of the text; a schema is enforced whatever `strict` is."""

    type: str
    name: str | None = None
    description: str | None = None
    schema_: Any = Field(None, alias="schema")
    strict: bool | None = None

    def to_structure(self) -> Structure | None:
        """None for plain text."""
        if self.type not in FORMATS:
            raise unsupported("text.format.type", "must be one of " + ", ".join(FORMATS))
        if self.type != "json_schema":
            return JsonSchema("text.format", ANY_OBJECT) if self.type == "json_object" else None
        return JsonSchema("text.format.schema", {} if self.schema_ is None else self.schema_)


class TextOptions(Strict):
    """Settings of the text."""

    format: TextFormat | None = None


class ResponseBody(Body):
    """POST /v1/responses."""

    neutral: ClassVar[Neutral] = fields.RESPONSE

    input: Input
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: Annotated[list[FunctionTool], BeforeValidator(_check_tools)] | None = None
    tool_choice: (
        Annotated[ToolChoice, PlainValidator(_parse_choice), WithJsonSchema(_CHOICE_SCHEMA)] | None
    ) = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    priority: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    def to_request(self, request_id: str) -> GenerationRequest:
        """The request. Raises RequestError naming the field at fault."""
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options", "is only allowed with stream: true")
        if self.tool_choice is not None and not self.tools:
            raise invalid("tool_choice", "is only allowed with tools")
        check_range("max_output_tokens", self.max_output_tokens, 1, UINT32_MAX)
        sampling = SamplingParams(
            temperature=self.temperature, top_p=self.top_p, max_tokens=self.max_output_tokens
        )
        effort = None if self.reasoning is None else self.reasoning.effort
        conversation = Conversation(
            messages=tuple(self._messages()),
            tools=tuple(tool.to_tool() for tool in self.tools or ()),
            tool_choice=self.tool_choice or ToolChoice(),
            parallel_tool_calls=self.parallel_tool_calls is not False,
            rendering=Rendering(reasoning_effort=effort),
        )
        form = None if self.text is None else self.text.format
        return GenerationRequest(
            request_id,
            conversation,
            sampling,
            model=self.model,
            structure=None if form is None else form.to_structure(),
        )

    def _messages(self) -> list[Message]:
        turns: list[Message] = []
        if self.instructions is not None:
            turns.append(Message("system", self.instructions))
        for item in self.input:
            _add(turns, item)
        return turns


def _add(turns: list[Message], item: Item) -> None:
    """Adds an item; consecutive reasoning, content and calls of the assistant form one turn."""
    match item:
        case MessageItem(role="assistant"):
            turn = _open_turn(turns, is_new=lambda last: bool(last.content or last.tool_calls))
            turns[-1] = replace(turn, content=_text_of(item.content))
        case CallItem():
            turn = _open_turn(turns)
            call = ToolCall(item.call_id, item.name, item.arguments)
            turns[-1] = replace(turn, tool_calls=(*turn.tool_calls, call))
        case ReasoningItem():
            if item.content:
                turn = _open_turn(turns, is_new=lambda last: True)
                turns[-1] = replace(turn, reasoning=_text_of(item.content))
        case ResultItem():
            turns.append(Message("tool", _text_of(item.output), tool_call_id=item.call_id))
        case MessageItem():
            turns.append(Message(item.role, _text_of(item.content)))


def _open_turn(
    turns: list[Message], is_new: Callable[[Message], bool] = lambda last: False
) -> Message:
    """The assistant's turn at the end of `turns`, or a new one."""
    if not turns or turns[-1].role != "assistant" or is_new(turns[-1]):
        turns.append(Message("assistant", None))
    return turns[-1]
