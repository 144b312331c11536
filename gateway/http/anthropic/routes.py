"""POST /v1/messages and /v1/messages/count_tokens."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from gateway.chat.conversation import Conversation
from gateway.errors.request_errors import ended_by
from gateway.http.anthropic.answer import MessageAnswer, failure, written
from gateway.http.anthropic.blocks import Placed, Turn
from gateway.http.anthropic.body import CountBody, MessagesBody, own_names
from gateway.http.anthropic.edits import edited
from gateway.http.anthropic.measure import Measure
from gateway.http.anthropic.thinking import Thinker
from gateway.http.completions import streamed, unless_disconnected
from gateway.http.event_stream import Waiting
from gateway.http.headers import request_id_of, standing_of
from gateway.http.session_hints import session_of
from gateway.pipeline.pipeline import Pipeline
from gateway.request.generation import GenerationRequest, OutputDelta, ServedModel, parts_of
from gateway.tokens.tokenizer import Tokenizer

PING = b'event: ping\ndata: {"type": "ping"}\n\n'
WAITING = Waiting(PING, lambda error: failure(ended_by(error)))
OWN_REQUEST_ID = "request-id"  # Anthropic's clients show it with an error


@dataclass(slots=True)
class NamedCaller:
    """Who asks, as the fields of other bodies say it."""

    priority: int | None
    user: str | None


@dataclass(frozen=True, slots=True)
class Shown:
    """The turns that the model is shown, and what was taken out of them."""

    turns: list[Placed]
    applied_edits: list[dict[str, Any]] | None  # None: no edits were asked for


@dataclass(frozen=True, slots=True)
class MessageRoutes:
    """The parts of the gateway that both routes need."""

    pipeline: Pipeline
    tokenizer: Tokenizer
    thinker: Thinker

    def measure(self, body: CountBody, model: ServedModel) -> Measure:
        """Counts the tokens of forms of the body's conversation."""

        def chat_of(turns: list[Turn]) -> Conversation:
            placed = body.to_turns(turns)
            with own_names(placed):
                return body.to_conversation(placed, self.thinker)

        return Measure(self.tokenizer, model.max_model_len, chat_of)

    async def shown(self, body: CountBody, measure: Measure) -> Shown:
        """The conversation after its edits. Raises RequestError."""
        if body.context_management is None:
            return Shown(body.to_turns(), None)
        found = await edited(body.context_management, body.messages, measure)
        return Shown(body.to_turns(found.turns), found.applied)

    async def counted(self, body: CountBody) -> dict[str, Any]:
        """The answer of count_tokens. Raises RequestError."""
        measure = self.measure(body, self.pipeline.resolve_model(body.model))
        shown = await self.shown(body, measure)
        with own_names(shown.turns):
            chat = body.to_conversation(shown.turns, self.thinker)
            self.pipeline.chat_format.check(chat)
            num_tokens = await self.tokenizer.count(chat)
        counted: dict[str, Any] = {"input_tokens": num_tokens}
        if shown.applied_edits is not None:
            original = (
                await measure.num_tokens(body.messages) if shown.applied_edits else num_tokens
            )
            counted["context_management"] = {"original_input_tokens": original}
        return counted


def add_message_routes(
    app: FastAPI, pipeline: Pipeline, tokenizer: Tokenizer, answers: dict[int | str, Any]
) -> None:
    """Adds both routes; `answers` describes what is not an error."""
    thinker = Thinker(pipeline.chat_format.reasoning is not None, tokenizer.template)
    routes = MessageRoutes(pipeline, tokenizer, thinker)

    @app.post("/v1/messages", responses=answers)
    async def messages(body: MessagesBody, request: Request) -> Response:
        return await _answer(body, request, routes)

    @app.post("/v1/messages/count_tokens")
    async def count_tokens(body: CountBody, request: Request) -> dict[str, Any]:
        return await unless_disconnected(request, routes.counted(body))


async def _answer(body: MessagesBody, request: Request, routes: MessageRoutes) -> Response:
    """Runs one HTTP request until its end, or until its client disconnects."""
    pipeline = routes.pipeline
    message_id = request_id_of(request.headers, None, "msg_")
    user = None if body.metadata is None else body.metadata.user_id
    standing = standing_of(NamedCaller(body.priority, user), request.headers)
    model = pipeline.resolve_model(body.model)
    shown = await routes.shown(body, routes.measure(body, model))
    turns = shown.turns
    answer = MessageAnswer(message_id, model.name, body.max_tokens, shown.applied_edits)
    with own_names(turns):
        wanted = body.to_request(message_id, turns, routes.thinker)
        wanted = wanted.of(standing, await session_of(request))
    headers = {OWN_REQUEST_ID: message_id}
    if body.stream:
        stream = await streamed(request, _events(pipeline, wanted, answer, turns), WAITING)
        stream.headers.update(headers)
        return stream
    with own_names(turns):
        whole = await unless_disconnected(request, pipeline.complete(wanted))
    answer.add(parts_of(whole))
    answer.end(whole.finish)
    return JSONResponse(answer.body, headers=headers)


async def _events(
    pipeline: Pipeline, wanted: GenerationRequest, answer: MessageAnswer, turns: Sequence[Placed]
) -> AsyncGenerator[bytes, None]:
    has_begun = False
    with own_names(turns):
        async with aclosing(pipeline.generate(wanted)) as deltas:
            async for delta in deltas:
                events = [] if has_begun else answer.begin(_usage_of(delta))
                events += answer.add(parts_of(delta))
                if delta.finish is not None:
                    events += answer.end(delta.finish)
                if events:
                    has_begun = True
                    yield written(events)


def _usage_of(delta: OutputDelta) -> Any:
    return delta.usage if delta.finish is None else delta.finish.usage
