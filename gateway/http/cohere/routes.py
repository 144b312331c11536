"""POST /v2/embed and /v2/chat, each also below /cohere."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from gateway.errors.request_errors import ended_by
from gateway.http.anthropic.routes import NamedCaller
from gateway.http.anthropic.thinking import Thinker
from gateway.http.cohere.chat_answer import CohereAnswer, failure, written
from gateway.http.cohere.chat_body import CohereChatBody, own_names
from gateway.http.cohere.embed_body import EmbedBody
from gateway.http.cohere.vectors import by_type
from gateway.http.completions import streamed, unless_disconnected
from gateway.http.embeddings import check_size
from gateway.http.event_stream import COMMENT, Waiting
from gateway.http.headers import request_id_of, standing_of
from gateway.http.session_hints import session_of
from gateway.outputs.fan_out import embed_all
from gateway.pipeline.pipeline import Pipeline
from gateway.request.generation import GenerationRequest, parts_of
from gateway.tokens.tokenizer import Tokenizer

PREFIX = "/cohere"
_API = {"api_version": {"version": "2"}}


def add_cohere_routes(
    app: FastAPI, pipeline: Pipeline, tokenizer: Tokenizer, answers: dict[int | str, Any]
) -> None:
    """Adds the routes; `answers` describes what is not an error."""
    thinker = Thinker(pipeline.chat_format.reasoning is not None, tokenizer.template)

    async def cohere_embed(body: EmbedBody, request: Request) -> Response:
        return await _embed(body, request, pipeline)

    async def cohere_chat(body: CohereChatBody, request: Request) -> Response:
        return await _chat(body, request, pipeline, thinker)

    for prefix in ("", PREFIX):
        is_shown = not prefix
        app.post(f"{prefix}/v2/embed", include_in_schema=is_shown)(cohere_embed)
        app.post(f"{prefix}/v2/chat", responses=answers, include_in_schema=is_shown)(cohere_chat)


async def _embed(body: EmbedBody, request: Request, pipeline: Pipeline) -> Response:
    request_id = request_id_of(request.headers, None, "embd-")
    standing = standing_of(NamedCaller(body.priority, None), request.headers)
    field, texts = body.all_texts
    wanted = [replace(one, standing=standing) for one in body.to_requests(request_id)]
    pipeline.resolve_model(body.model)
    found = await unless_disconnected(request, embed_all(pipeline, wanted, field, True))
    check_size("output_dimension", body.output_dimension, len(found[0].vector))
    num_tokens = sum(one.usage.num_prompt_tokens for one in found)
    return JSONResponse(
        {
            "response_type": "embeddings_by_type",
            "id": request_id,
            "embeddings": by_type(body.types, [one.vector for one in found]),
            "texts": texts,
            "meta": _API | {"billed_units": {"input_tokens": num_tokens}},
        }
    )


async def _chat(
    body: CohereChatBody, request: Request, pipeline: Pipeline, thinker: Thinker
) -> Response:
    """Runs one HTTP request until its end, or until its client disconnects."""
    answer_id = request_id_of(request.headers, None, "chat-")
    standing = standing_of(NamedCaller(body.priority, None), request.headers)
    pipeline.resolve_model(body.model)
    with own_names():
        wanted = body.to_request(answer_id, thinker).of(standing, await session_of(request))
    answer, has_logprobs = CohereAnswer(answer_id), bool(body.logprobs)
    if body.stream:
        return await streamed(request, _events(pipeline, wanted, answer), WAITING)
    with own_names():
        whole = await unless_disconnected(request, pipeline.complete(wanted))
    answer.add(parts_of(whole), whole.logprobs)
    answer.end(whole.finish, has_logprobs=has_logprobs)
    return JSONResponse(answer.body)


async def _events(
    pipeline: Pipeline, wanted: GenerationRequest, answer: CohereAnswer
) -> AsyncGenerator[bytes, None]:
    has_begun = False
    with own_names():
        async with aclosing(pipeline.generate(wanted)) as deltas:
            async for delta in deltas:
                events = [] if has_begun else answer.begin()
                events += answer.add(parts_of(delta), delta.logprobs)
                if delta.finish is not None:
                    events += answer.end(delta.finish)
                if events:
                    has_begun = True
                    yield written(events)


WAITING = Waiting(COMMENT, lambda error: failure(ended_by(error)))
