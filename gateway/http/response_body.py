"""The body of POST /v1/responses, and its conversion to a chat."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, ValidationError

from gateway.chat.conversation import (
    Conversation,
    Message,
    Rendering,
    ToolCall,
    ToolChoice,
    ToolMode,
)
from gateway.errors import limits
from gateway.errors.request_errors import invalid, unsupported
from gateway.http import fields, media
from gateway.http.attribution import unattributed
from gateway.http.messages import TEXT_KINDS, Strict, TextPart
from gateway.http.response_tools.bodies import (
    AnyTool,
    CalledTool,
    ResponseChoice,
    ResponseTools,
    to_tools,
)
from gateway.http.response_tools.input_text import to_arguments
from gateway.http.response_tools.other_items import as_items, is_other
from gateway.http.schema import (
    RANDOM_SEED,
    Biases,
    Body,
    StreamOptions,
    Texts,
    to_limit,
    to_reuse,
)
from gateway.http.structured import FORMATS, StructuredOutputs, the_one_of
from gateway.request.generation import GenerationRequest, SamplingParams, check_range
from gateway.structure.structure import ANY_OBJECT, JsonSchema, Structure
from gateway.structure.tags import Asked
from wire.requests.numbers import UINT32_MAX


def _as_parts(value: Any) -> Any:
    if isinstance(value, str):
        return [{"type": "input_text", "text": value}]
    if not isinstance(value, list):
        return value
    limits.check_count("input", len(value), limits.MAX_CONTENT_PARTS)
    return [_part(part) for part in value]


def _part(part: Any) -> Any:
    return {"type": "input_text", "text": part} if isinstance(part, str) else part


TextParts = Annotated[
    list[TextPart],
    BeforeValidator(_as_parts, json_schema_input_type=str | list[TextPart]),
]


def _text_of(parts: list[TextPart]) -> str:
    return "\n".join(part.content for part in parts)


LOGPROBS = "message.output_text.logprobs"  # all else that `include` names is of tools not here


class ItemBody(Strict):
    """An item, with what clients copy from an earlier answer."""

    harmless: ClassVar[Collection[str]] = fields.COPIED
    where: ClassVar[str | None] = "input[]."


class MessageItem(ItemBody):
    """A turn."""

    type: Literal["message"] = "message"
    role: str
    content: TextParts


class CallItem(ItemBody):
    """A call by the model."""

    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str

    def to_call(self) -> ToolCall:
        """The call as a value of the gateway."""
        name = CalledTool(self.name, self.namespace).full_name
        return ToolCall(self.call_id, name, self.arguments)


class CustomCallItem(ItemBody):
    """A call of a custom tool by the model."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    namespace: str | None = None
    input: str

    def to_call(self) -> ToolCall:
        """The call as a value of the gateway."""
        name = CalledTool(self.name, self.namespace).full_name
        return ToolCall(self.call_id, name, to_arguments(self.input))


class ResultItem(ItemBody):
    """The result of a call."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: TextParts


class ReasoningItem(ItemBody):
    """Reasoning of the model in an earlier turn; a summary of it repeats what it says."""

    harmless: ClassVar[Collection[str]] = fields.COPIED | {"summary", "encrypted_content"}

    type: Literal["reasoning"]
    content: TextParts | None = None


class ItemReference(ItemBody):
    """An item of an earlier answer, by its id."""

    type: Literal["item_reference"] = "item_reference"
    id: str


class ToolsItem(ItemBody):
    """Tools that are added, or were found by a search, on the way."""

    harmless: ClassVar[Collection[str]] = fields.COPIED | {"call_id", "execution", "role"}

    type: Literal["additional_tools", "tool_search_output"]
    tools: ResponseTools


Said = MessageItem | CallItem | CustomCallItem | ResultItem | ReasoningItem
Item = Said | ItemReference | ToolsItem
_KINDS: dict[str, type[Item]] = {
    "message": MessageItem,
    "function_call": CallItem,
    "function_call_output": ResultItem,
    "custom_tool_call": CustomCallItem,
    "custom_tool_call_output": ResultItem,
    "reasoning": ReasoningItem,
    "item_reference": ItemReference,
    "additional_tools": ToolsItem,
    "tool_search_output": ToolsItem,
}
_PARTS = ("content", "output")  # the fields of items that hold parts


def _parse_input(value: Any) -> Any:
    """Parses text as one turn of the user, and items by their type."""
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if not isinstance(value, list):
        return value
    limits.check_count("input", len(value), limits.MAX_MESSAGES)
    if not value:
        raise invalid("input", "is empty")
    return parse_items("input", value)


def parse_items(path: str, items: list[Any]) -> list[Item]:
    """Items by their type. Raises RequestError naming the one at fault below `path`."""
    return [
        parsed
        for index, item in enumerate(items)
        for parsed in _parse_item(f"{path}[{index}]", item)
    ]


def _parse_item(path: str, item: Any) -> Iterator[Item]:
    kind = _kind_of(item)
    if isinstance(kind, str) and is_other(kind):
        for told in as_items(path, kind, item):
            yield from _parse_item(path, told)
        return
    if not isinstance(kind, str) or kind not in _KINDS:
        raise unsupported(f"{path}.type", f"must be one of {', '.join(_KINDS)}")
    try:
        yield _KINDS[kind].model_validate(_with_readable_parts(path, item))
    except ValidationError as error:
        raise fields.refusal(error.errors()[0], path) from error


def _kind_of(item: Any) -> Any:
    """The type, which messages and references may leave out."""
    if not isinstance(item, dict):
        return None
    kind = item.get("type")
    if kind is not None:
        return kind
    return "item_reference" if "id" in item and "role" not in item else "message"


def _with_readable_parts(path: str, item: dict[str, Any]) -> dict[str, Any]:
    """The item without parts that hold nothing. Raises RequestError for those that are no text."""
    for name in _PARTS:
        parts = item.get(name)
        if isinstance(parts, list):
            limits.check_count(f"{path}.{name}", len(parts), limits.MAX_CONTENT_PARTS)
            item = item | {name: media.readable(f"{path}.{name}", parts, TEXT_KINDS)}
    return item


Input = Annotated[
    list[Item], BeforeValidator(_parse_input, json_schema_input_type=str | list[Item])
]


class ReasoningOptions(Strict):
    """The reasoning effort; the reasoning itself is in the answer, so there is no summary."""

    harmless: ClassVar[Collection[str]] = frozenset({"summary", "generate_summary"})

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

    harmless: ClassVar[Collection[str]] = frozenset({"verbosity"})

    format: TextFormat | None = None


class ResponseBody(Body):
    """POST /v1/responses."""

    neutral: ClassVar[fields.Neutral] = fields.RESPONSE
    harmless: ClassVar[Collection[str]] = fields.RESPONSE_HARMLESS

    input: Input
    include: list[str] | None = None
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    stop: Texts | None = None
    stop_token_ids: list[int] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    logit_bias: Biases | None = None
    structured_outputs: StructuredOutputs | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: str | None = None
    skip_prefix_cache: bool | None = None
    skip_speculation: bool | None = None
    request_id: str | None = None
    tools: ResponseTools | None = None
    tool_choice: ResponseChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    priority: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None

    @property
    def all_tools(self) -> list[AnyTool]:
        """The tools, and those that items add under names of their own."""
        tools = list(self.tools or ())
        names = {tool.name for tool in tools}
        for item in self.input:
            for tool in item.tools if isinstance(item, ToolsItem) else ():
                if tool.name not in names:
                    names.add(tool.name)
                    tools.append(tool)
        return tools

    def to_request(self, request_id: str, earlier: Sequence[Item] = ()) -> GenerationRequest:
        """The request, after `earlier` items. Raises RequestError naming the field at fault."""
        if LOGPROBS in (self.include or ()):
            raise unsupported("include", f"{LOGPROBS} is not supported by this server")
        choice = self.tool_choice or ToolChoice()
        tools = to_tools(self.all_tools)
        if choice.mode is ToolMode.REQUIRED and not tools:
            raise invalid("tool_choice", "is only allowed with tools")
        effort = None if self.reasoning is None else self.reasoning.effort
        conversation = Conversation(
            messages=unattributed(self._messages(earlier)),
            tools=tools,
            tool_choice=choice,
            parallel_tool_calls=self.parallel_tool_calls is not False,
            rendering=Rendering(kwargs=self.chat_template_kwargs or {}, reasoning_effort=effort),
        )
        return GenerationRequest(
            request_id,
            conversation,
            self._sampling(),
            stop=tuple(self.stop or ()),
            include_stop_str_in_output=bool(self.include_stop_str_in_output),
            skip_special_tokens=self.skip_special_tokens is not False,
            model=self.model,
            reuse=to_reuse(self.cache_salt, self.skip_prefix_cache),
            structure=self._structure(),
        )

    def _sampling(self) -> SamplingParams:
        limit = to_limit(self.max_output_tokens)
        check_range("max_output_tokens", limit, 1, UINT32_MAX)
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            seed=None if self.seed == RANDOM_SEED else self.seed,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            max_tokens=limit,
            min_tokens=self.min_tokens,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=self.ignore_eos,
            logit_bias=self.logit_bias or (),
            skip_speculation=self.skip_speculation,
        )

    def _structure(self) -> Asked | None:
        """The form that the text must have. Raises RequestError for two of them."""
        form = None if self.text is None else self.text.format
        structures: dict[str, Asked] = {}
        for name, asking in (
            ("text.format", form),
            ("structured_outputs", self.structured_outputs),
        ):
            if asking is not None and (structure := asking.to_structure()) is not None:
                structures[name] = structure
        return the_one_of(structures)

    def _messages(self, earlier: Sequence[Item]) -> list[Message]:
        turns: list[Message] = []
        if self.instructions is not None:
            turns.append(Message("system", self.instructions))
        for item in (*earlier, *self.input):
            _add(turns, item)
        return turns


def _add(turns: list[Message], item: Item) -> None:
    """Adds an item; consecutive reasoning, content and calls of the assistant form one turn."""
    match item:
        case MessageItem(role="assistant"):
            turn = _open_turn(turns, is_new=lambda last: bool(last.content or last.tool_calls))
            turns[-1] = replace(turn, content=_text_of(item.content))
        case CallItem() | CustomCallItem():
            turn = _open_turn(turns)
            turns[-1] = replace(turn, tool_calls=(*turn.tool_calls, item.to_call()))
        case ReasoningItem():
            if item.content:
                turn = _open_turn(turns, is_new=lambda last: True)
                turns[-1] = replace(turn, reasoning=_text_of(item.content))
        case ResultItem():
            turns.append(Message("tool", _text_of(item.output), tool_call_id=item.call_id))
        case MessageItem():
            turns.append(Message(item.role, _text_of(item.content)))
        case ToolsItem() | ItemReference():
            pass  # those are told with the other tools, these were replaced


def _open_turn(
    turns: list[Message], is_new: Callable[[Message], bool] = lambda last: False
) -> Message:
    """The assistant's turn at the end of `turns`, or a new one."""
    if not turns or turns[-1].role != "assistant" or is_new(turns[-1]):
        turns.append(Message("assistant", None))
    return turns[-1]
