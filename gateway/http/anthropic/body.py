"""Bodies of POST /v1/messages and /v1/messages/count_tokens, and their conversion to a chat."""

import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar, Literal

from pydantic import Field

from gateway.chat.conversation import Conversation, Rendering
from gateway.errors.request_errors import RequestError, invalid
from gateway.http import fields
from gateway.http.anthropic.blocks import (
    Placed,
    System,
    Turn,
    Turns,
    added_tools,
    effort_of,
    to_turns,
)
from gateway.http.anthropic.edits import ContextManagement
from gateway.http.anthropic.thinking import Thinker, ThinkingOptions
from gateway.http.anthropic.tools import ChoiceBody, Tools, to_tools
from gateway.http.messages import Strict
from gateway.http.schema import Body
from gateway.request.generation import GenerationRequest, SamplingParams
from gateway.structure.structure import JsonSchema
from gateway.structure.thinking import BUDGET

# What the fields of a chat are called here.
_NAMES = (
    (re.compile(r"stop(\[\d+\])?"), r"stop_sequences\1"),
    (re.compile(r"continue_final_message"), "messages"),
    (re.compile(r"reasoning_effort"), "output_config.effort"),
    (re.compile(BUDGET), "thinking.budget_tokens"),
)
_TURN = re.compile(r"messages\[(\d+)\](\..*)?")


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
    tools: Tools | None = None
    tool_choice: ChoiceBody | None = None
    thinking: ThinkingOptions | None = None
    output_config: OutputConfig | None = None
    output_format: FormatBody | None = None
    context_management: ContextManagement | None = None

    def to_turns(self, turns: list[Turn] | None = None) -> list[Placed]:
        """The turns of the chat, each with its place in the request; others in place of its own."""
        return to_turns(self.system, self.messages if turns is None else turns)

    def to_conversation(self, turns: Sequence[Placed], thinker: Thinker) -> Conversation:
        """The chat. Raises RequestError by the names of chats: see own_names()."""
        if not self.messages:
            raise invalid("messages", "is empty")
        choice = self.tool_choice or ChoiceBody(type="auto")
        config = self.output_config or OutputConfig()
        tools = tuple(to_tools(self.tools or (), added_tools(self.messages)))
        if choice.type in ("any", "tool") and not tools:
            raise invalid("tool_choice", "is only allowed with tools")
        effort = effort_of(self.messages) or config.effort
        kwargs, effort = thinker.settings(self.thinking, effort)
        return Conversation(
            messages=tuple(message for _, message in turns),
            tools=tools,
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
            structure=self._structure(),
            counts_usage=bool(self.stream),  # a stream begins with the prompt's tokens
        )

    def _structure(self) -> JsonSchema | None:
        """The form that the text must have. Raises RequestError for two of them."""
        form = None if self.output_config is None else self.output_config.format
        if form is None:
            older = self.output_format
            return None if older is None else JsonSchema("output_format.schema", older.schema_)
        if self.output_format is not None:
            raise invalid("output_format", "contradicts output_config.format; send one of them")
        return JsonSchema("output_config.format.schema", form.schema_)


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
