"""Bodies of POST /v1/messages and /v1/messages/count_tokens, and their conversion to a chat."""

import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from gateway import limits
from gateway.chat.conversation import Conversation, Rendering, Tool, ToolChoice, ToolMode
from gateway.errors import RequestError, invalid
from gateway.generation import GenerationRequest, SamplingParams
from gateway.http import fields
from gateway.http.anthropic.blocks import Placed, System, Turns, to_turns
from gateway.http.anthropic.thinking import Thinker, ThinkingOptions
from gateway.http.messages import Strict, check_list
from gateway.http.schema import Body
from gateway.structure.structure import JsonSchema
from gateway.structure.thinking import BUDGET

_MODES = {
    "auto": ToolMode.AUTO,
    "any": ToolMode.REQUIRED,
    "tool": ToolMode.REQUIRED,
    "none": ToolMode.NONE,
}
# What the fields of a chat are called here.
_NAMES = (
    (re.compile(r"(tools\[\d+\])\.function\.name"), r"\1.name"),
    (re.compile(r"(tools\[\d+\])\.function\.parameters(.*)"), r"\1.input_schema\2"),
    (re.compile(r"stop(\[\d+\])?"), r"stop_sequences\1"),
    (re.compile(r"continue_final_message"), "messages"),
    (re.compile(r"reasoning_effort"), "output_config.effort"),
    (re.compile(BUDGET), "thinking.budget_tokens"),
)
_TURN = re.compile(r"messages\[(\d+)\](\..*)?")


class CustomTool(Strict):
    """A tool that the caller runs."""

    neutral: ClassVar[fields.Neutral] = {
        "allowed_callers": (["direct"],),
        "defer_loading": (False,),
        "input_examples": ([],),
    }
    harmless: ClassVar[Collection[str]] = fields.COPIED | {"eager_input_streaming"}
    where: ClassVar[str | None] = "tools[]."

    type: Literal["custom"] = "custom"
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None

    def to_tool(self) -> Tool:
        """The tool as a value of the gateway."""
        return Tool(self.name, self.description, self.input_schema, bool(self.strict))


def _check_tools(tools: Any) -> Any:
    check_list("tools", tools, limits.MAX_TOOLS, "custom")
    return tools


class ChoiceBody(Strict):
    """Whether the model calls tools."""

    where: ClassVar[str | None] = "tool_choice."

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    def to_choice(self) -> ToolChoice:
        """The choice as a value of the gateway. Raises RequestError."""
        if (self.name is not None) != (self.type == "tool"):
            raise invalid("tool_choice.name", 'belongs to type "tool", which needs it')
        return ToolChoice(_MODES[self.type], self.name)


class FormatBody(Strict):
    """The form of the text."""

    where: ClassVar[str | None] = "output_config.format."

    type: Literal["json_schema"]
    schema_: Any = Field(alias="schema")


class OutputConfig(Strict):
    """The form of the answer, and how much the model thinks."""

    where: ClassVar[str | None] = "output_config."

    effort: str | None = None
    format: FormatBody | None = None


class Metadata(Strict):
    """The caller's bookkeeping."""

    where: ClassVar[str | None] = "metadata."

    user_id: str | None = None


class CountBody(Body):
    """POST /v1/messages/count_tokens, and what /v1/messages has in common with it."""

    neutral: ClassVar[fields.Neutral] = fields.MESSAGES
    harmless: ClassVar[Collection[str]] = fields.MESSAGES_HARMLESS

    messages: Turns
    model: str | None = None
    system: System | None = None
    tools: Annotated[list[CustomTool], BeforeValidator(_check_tools)] | None = None
    tool_choice: ChoiceBody | None = None
    thinking: ThinkingOptions | None = None
    output_config: OutputConfig | None = None

    def to_turns(self) -> list[Placed]:
        """The turns of the chat, each with its place in the request."""
        return to_turns(self.system, self.messages)

    def to_conversation(self, turns: Sequence[Placed], thinker: Thinker) -> Conversation:
        """The chat. Raises RequestError by the names of chats: see own_names()."""
        if not self.messages:
            raise invalid("messages", "is empty")
        choice = self.tool_choice or ChoiceBody(type="auto")
        config = self.output_config or OutputConfig()
        if choice.type in ("any", "tool") and not self.tools:
            raise invalid("tool_choice", "is only allowed with tools")
        kwargs, effort = thinker.settings(self.thinking, config.effort)
        return Conversation(
            messages=tuple(message for _, message in turns),
            tools=tuple(tool.to_tool() for tool in self.tools or ()),
            tool_choice=choice.to_choice(),
            parallel_tool_calls=not choice.disable_parallel_tool_use,
            include_reasoning=self.thinking is None or not self.thinking.is_hidden,
            rendering=Rendering(
                kwargs=kwargs,
                reasoning_effort=effort,
                # As in Anthropic's API the answer goes on with a last turn of the assistant.
                continue_final_message=self.messages[-1].role == "assistant",
            ),
        )


class MessagesBody(CountBody):
    """POST /v1/messages."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    metadata: Metadata | None = None
    priority: int | None = None
    stream: bool | None = None

    def to_request(
        self, request_id: str, turns: Sequence[Placed], thinker: Thinker
    ) -> GenerationRequest:
        """The request. Raises RequestError by the names of chats: see own_names()."""
        chat = self.to_conversation(turns, thinker)
        if self.thinking is not None:
            budget = self.thinking.max_tokens_of(self.max_tokens)
            chat = replace(chat, max_reasoning_tokens=budget)
        form = None if self.output_config is None else self.output_config.format
        structure = None
        if form is not None:
            structure = JsonSchema("output_config.format.schema", form.schema_)
        return GenerationRequest(
            request_id,
            chat,
            SamplingParams(
                temperature=self.temperature,
                top_p=self.top_p,
                top_k=self.top_k,
                max_tokens=self.max_tokens,
            ),
            stop=tuple(self.stop_sequences or ()),
            model=self.model,
            structure=structure,
            counts_usage=bool(self.stream),  # a stream begins with the prompt's tokens
        )


@contextmanager
def own_names(turns: Sequence[Placed]) -> Iterator[None]:
    """Renames the fields of a chat in errors to those of this API."""
    try:
        yield
    except RequestError as error:
        if error.field is None or (name := _own_name(error.field, turns)) == error.field:
            raise
        raise error.renamed(error.field, name) from error


def _own_name(field: str, turns: Sequence[Placed]) -> str:
    if (found := _TURN.fullmatch(field)) and int(found[1]) < len(turns):
        place, _ = turns[int(found[1])]
        return place if place == "system" else f"{place}.content"
    for pattern, name in _NAMES:
        if found := pattern.fullmatch(field):
            return found.expand(name)
    return field
