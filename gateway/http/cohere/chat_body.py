"""The body of Cohere's `/v2/chat`, and what it asks for."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from gateway.chat.conversation import (
    Conversation,
    Message,
    Rendering,
    Tool,
    ToolChoice,
    ToolMode,
)
from gateway.errors import limits
from gateway.errors.request_errors import RequestError, invalid, unsupported
from gateway.http import fields, media
from gateway.http.anthropic.thinking import Thinker, ThinkingOptions
from gateway.http.messages import Strict, ToolCallBody, Tools, to_tools
from gateway.http.schema import RANDOM_SEED, Body
from gateway.request.generation import GenerationRequest, SamplingParams
from gateway.structure.structure import ANY_OBJECT, JsonSchema
from gateway.text.unicode import to_json

# What errors of chats name -> the same in this API.
_NAMES = {
    "top_p": "p",
    "top_k": "k",
    "stop": "stop_sequences",
    "thinking.budget_tokens": "thinking.token_budget",
}
_PART_KINDS = ("text", "thinking", "document")


class DocumentContent(Strict):
    """A document: text, or an object of named texts."""

    harmless: ClassVar[Collection[str]] = frozenset({"id"})
    where: ClassVar[str | None] = "documents[]."

    data: str | dict[str, Any]
    id: str | None = None

    @property
    def text(self) -> str:
        """The document as one text."""
        return self.data if isinstance(self.data, str) else to_json(self.data)

    def to_mapping(self) -> Mapping[str, Any]:
        """The document as chat templates read it."""
        named = {} if self.id is None else {"id": self.id}
        return named | ({"text": self.data} if isinstance(self.data, str) else self.data)


class ContentPart(Strict):
    """A piece of a turn."""

    harmless: ClassVar[Collection[str]] = fields.COPIED
    where: ClassVar[str | None] = "messages[].content[]."

    type: Literal["text", "thinking", "document"]
    text: str | None = None
    thinking: str | None = None
    document: DocumentContent | None = None

    @property
    def content(self) -> str:
        """Its text. Raises RequestError where the field of its type is missing."""
        value = getattr(self, self.type)
        if value is None:
            raise invalid(f"messages[].content[].{self.type}", "is missing")
        return value.text if isinstance(value, DocumentContent) else str(value)


def _as_parts(value: Any) -> Any:
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if not isinstance(value, list):
        return value
    limits.check_count("messages[].content", len(value), limits.MAX_CONTENT_PARTS)
    return media.readable("messages[].content", value, _PART_KINDS)


class CohereTurn(Strict):
    """One turn. Its pieces are joined by line breaks."""

    harmless: ClassVar[Collection[str]] = fields.COPIED | {"citations"}
    where: ClassVar[str | None] = "messages[]."

    role: Literal["system", "user", "assistant", "tool"]
    content: Annotated[
        list[ContentPart] | None,
        BeforeValidator(_as_parts, json_schema_input_type=str | list[ContentPart] | None),
    ] = None
    tool_calls: list[ToolCallBody] | None = None
    tool_plan: str | None = None
    tool_call_id: str | None = None

    def to_message(self) -> Message:
        """The turn as a value of the gateway; a plan of calls is its content. RequestError."""
        parts = self.content or ()
        texts = [part.content for part in parts if part.type != "thinking"]
        if not texts and self.tool_plan is not None:
            texts = [self.tool_plan]
        thoughts = [part.content for part in parts if part.type == "thinking"]
        return Message(
            role=self.role,
            content="\n".join(texts) if texts else None,
            reasoning="\n".join(thoughts) if thoughts else None,
            tool_calls=tuple(call.to_call() for call in self.tool_calls or ()),
            tool_call_id=self.tool_call_id,
        )


def _check_turns(turns: Any) -> Any:
    if isinstance(turns, list):
        limits.check_count("messages", len(turns), limits.MAX_MESSAGES)
    return turns


def _as_documents(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    limits.check_count("documents", len(value), limits.MAX_DOCUMENTS)
    return [{"data": entry} if isinstance(entry, str) else entry for entry in value]


class CohereFormat(Strict):
    """The form of the answer; the schema stands under its newer name or its older one."""

    where: ClassVar[str | None] = "response_format."

    type: Literal["text", "json_object"]
    json_schema: dict[str, Any] | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")

    def to_structure(self) -> JsonSchema | None:
        """None for plain text. Raises RequestError."""
        name = "json_schema" if self.schema_ is None else "schema"
        place = f"response_format.{name}"
        if self.json_schema is not None and self.schema_ is not None:
            raise invalid(place, "is another name of json_schema; send one of them")
        schema = self.json_schema if self.schema_ is None else self.schema_
        if self.type == "json_object":
            return JsonSchema(place, ANY_OBJECT if schema is None else schema)
        if schema is not None:
            raise invalid(place, 'belongs to type "json_object"')
        return None


class CohereThinking(Strict):
    """The model's thinking: on or off, and its most tokens."""

    where: ClassVar[str | None] = "thinking."

    type: Literal["enabled", "disabled"]
    token_budget: int | None = None


class CohereChatBody(Body):
    """POST /v2/chat."""

    neutral: ClassVar[fields.Neutral] = fields.COHERE_CHAT

    messages: Annotated[list[CohereTurn], BeforeValidator(_check_turns)]
    model: str | None = None
    stream: bool | None = None
    tools: Tools | None = None
    strict_tools: bool | None = None
    tool_choice: Literal["REQUIRED", "NONE"] | None = None
    documents: Annotated[
        list[DocumentContent] | None,
        BeforeValidator(_as_documents, json_schema_input_type=list[str | DocumentContent] | None),
    ] = None
    response_format: CohereFormat | None = None
    max_tokens: int | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    seed: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    k: int | None = None
    p: float | None = None
    logprobs: bool | None = None
    thinking: CohereThinking | None = None
    priority: int | None = None

    def to_request(self, request_id: str, thinker: Thinker) -> GenerationRequest:
        """The request. Raises RequestError by the names of chats: see own_names()."""
        form = None if self.response_format is None else self.response_format.to_structure()
        return GenerationRequest(
            request_id,
            self._conversation(thinker),
            SamplingParams(
                temperature=self.temperature,
                top_p=self.p,
                top_k=self.k,
                seed=None if self.seed == RANDOM_SEED else self.seed,
                max_tokens=self.max_tokens,
                frequency_penalty=self.frequency_penalty,
                presence_penalty=self.presence_penalty,
                num_top_logprobs=0 if self.logprobs else None,
            ),
            stop=tuple(self.stop_sequences or ()),
            model=self.model,
            structure=form,
        )

    def _conversation(self, thinker: Thinker) -> Conversation:
        asked = None
        if self.thinking is not None:
            budget = self.thinking.token_budget
            asked = ThinkingOptions(type=self.thinking.type, budget_tokens=budget)
        kwargs, _ = thinker.settings(asked, None)
        return Conversation(
            messages=tuple(turn.to_message() for turn in self.messages),
            tools=self._tools(),
            tool_choice=self._choice(),
            max_reasoning_tokens=None if asked is None else asked.max_tokens_of(self.max_tokens),
            rendering=Rendering(kwargs=kwargs, documents=self._documents(thinker)),
        )

    def _tools(self) -> tuple[Tool, ...]:
        tools = to_tools(self.tools or ())
        if not self.strict_tools:
            return tools
        return tuple(
            Tool(tool.name, tool.description, tool.parameters, is_strict=True, places=tool.places)
            for tool in tools
        )

    def _choice(self) -> ToolChoice:
        if self.tool_choice is None:
            return ToolChoice()
        return ToolChoice(ToolMode(self.tool_choice.lower()))

    def _documents(self, thinker: Thinker) -> tuple[Mapping[str, Any], ...]:
        """The documents. Raises RequestError where the chat template has no place for them."""
        if self.documents and not thinker.reads("documents"):
            raise unsupported("documents", "the model's chat template reads none")
        return tuple(document.to_mapping() for document in self.documents or ())


@contextmanager
def own_names() -> Iterator[None]:
    """Renames the fields of a chat in errors to those of this API."""
    try:
        yield
    except RequestError as error:
        name, bracket, rest = (error.field or "").partition("[")
        if name not in _NAMES:
            raise
        raise error.renamed(f"{name}{bracket}{rest}", f"{_NAMES[name]}{bracket}{rest}") from error
