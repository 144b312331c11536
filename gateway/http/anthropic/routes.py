"""POST /v1/messages and /v1/messages/count_tokens."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from gateway.errors import ended_by
from gateway.generation import GenerationRequest, OutputDelta, parts_of
from gateway.http.anthropic.answer import MessageAnswer, failure, written
from gateway.http.anthropic.blocks import Placed
from gateway.http.anthropic.body import CountBody, MessagesBody, own_names
from gateway.http.anthropic.thinking import Thinker
from gateway.http.completions import streamed, unless_disconnected
from gateway.http.headers import request_id_of, standing_of
from gateway.pipeline import Pipeline
from gateway.tokens.tokenizer import Tokenizer

OWN_REQUEST_ID = "request-id"  # Anthropic's clients show it with an error


@dataclass(slots=True)
class NamedCaller:
    """Who asks, as the fields of other bodies say it."""

    priority: int | None
    user: str | None


def add_message_routes(
    app: FastAPI, pipeline: Pipeline, tokenizer: Tokenizer, answers: dict[int | str, Any]
) -> None:
    """Adds both routes; `answers` describes what is not an error."""
    thinker = Thinker(pipeline.chat_format.reasoning is not None, tokenizer.template)

    @app.post("/v1/messages", responses=answers)
    async def messages(body: MessagesBody, request: Request) -> Response:
        return await _answer(body, request, pipeline, thinker)

    @app.post("/v1/messages/count_tokens")
    async def count_tokens(body: CountBody, request: Request) -> dict[str, int]:
        pipeline.resolve_model(body.model)
        turns = body.to_turns()
        with own_names(turns):
            chat = body.to_conversation(turns, thinker)
            pipeline.chat_format.check(chat)
            counted = await unless_disconnected(request, tokenizer.count(chat))
        return {"input_tokens": counted}


async def _answer(
    body: MessagesBody, request: Request, pipeline: Pipeline, thinker: Thinker
) -> Response:
    """Runs one HTTP request until its end, or until its client disconnects."""
    message_id = request_id_of(request.headers, None, "msg_")
    user = None if body.metadata is None else body.metadata.user_id
    standing = standing_of(NamedCaller(body.priority, user), request.headers)
    turns = body.to_turns()
    model = pipeline.resolve_model(body.model).name
    answer = MessageAnswer(message_id, model, body.max_tokens)
    with own_names(turns):
        wanted = replace(body.to_request(message_id, turns, thinker), standing=standing)
    headers = {OWN_REQUEST_ID: message_id}
    if body.stream:
        stream = await streamed(request, _events(pipeline, wanted, answer, turns))
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
    try:
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
    except Exception as error:  # whatever it is, the client hears of it in the stream
        if not has_begun:
            raise
        yield failure(ended_by(error))


def _usage_of(delta: OutputDelta) -> Any:
    return delta.usage if delta.finish is None else delta.finish.usage
