"""POST /v1/rerank and /v1/score, and their other names."""

import time
from dataclasses import replace
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from gateway.chat.conversation import Rendering
from gateway.errors.request_errors import unsupported
from gateway.http.completions import unless_disconnected
from gateway.http.headers import request_id_of, standing_of
from gateway.http.large_answers import built
from gateway.http.schema import to_reuse
from gateway.http.scoring.bodies import RerankBody, ScoreBody, ScoringBody
from gateway.http.scoring.relevance import (
    INSTRUCTION,
    NO,
    YES,
    AnswerTokens,
    Pair,
    Relevance,
    relevance_of,
    requests_of,
)
from gateway.outputs.fan_out import complete_all
from gateway.pipeline.pipeline import Pipeline
from gateway.request.generation import GenerationRequest
from gateway.tokens.tokenizer import Tokenizer


def add_scoring_routes(app: FastAPI, pipeline: Pipeline, tokenizer: Tokenizer) -> None:
    """Adds the routes, under the names that other servers give them."""

    async def rerank(body: RerankBody, request: Request) -> Response:
        request_id = request_id_of(request.headers, body.request_id, "rerank-")
        found = await _score(body, body.to_pairs(), request_id, request, pipeline, tokenizer)
        model = pipeline.resolve_model(body.model).name
        return JSONResponse(_ranked(body, found) | {"id": request_id, "model": model})

    async def score(body: ScoreBody, request: Request) -> Response:
        request_id = request_id_of(request.headers, body.request_id, "score-")
        found = await _score(body, body.to_pairs(), request_id, request, pipeline, tokenizer)
        model = pipeline.resolve_model(body.model).name
        head = {"id": request_id, "object": "list", "created": int(time.time()), "model": model}
        entries = [
            {"index": index, "object": "score", "score": relevance.score}
            for index, relevance in enumerate(found)
        ]
        return JSONResponse(head | {"data": entries, "usage": _usage(found)})

    for path in ("/v1/rerank", "/v2/rerank", "/rerank", "/cohere/v2/rerank"):
        app.post(path, include_in_schema=path == "/v1/rerank")(rerank)
    for path in ("/v1/score", "/score"):
        app.post(path, include_in_schema=path == "/v1/score")(score)


async def _score(
    body: ScoringBody,
    pairs: list[Pair],
    request_id: str,
    request: Request,
    pipeline: Pipeline,
    tokenizer: Tokenizer,
) -> list[Relevance]:
    """One relevance per pair, in order; the first failure ends them all."""
    pipeline.resolve_model(body.model)
    verdict = await _verdict(pipeline, tokenizer)
    standing = standing_of(body, request.headers)
    instruction = INSTRUCTION if body.instruction is None else body.instruction
    salt = to_reuse(body.cache_salt).cache_salt

    def requests() -> list[GenerationRequest]:
        return [
            replace(one, reuse=replace(one.reuse, cache_salt=salt))
            for index, pair in enumerate(pairs)
            for one in requests_of(f"{request_id}-{index}", pair, instruction, verdict, standing)
        ]

    wanted = await built(pipeline, requests, num_parts=len(pairs))
    names = [pair.name for pair in pairs for _ in range(2)]
    outputs = await unless_disconnected(request, complete_all(pipeline, wanted, names))
    return [relevance_of(outputs[at : at + 2]) for at in range(0, len(outputs), 2)]


async def _verdict(pipeline: Pipeline, tokenizer: Tokenizer) -> AnswerTokens:
    """The form in which the served model answers. Raises RequestError where it cannot judge."""
    template = tokenizer.template
    if template is None:
        raise unsupported("model", "has no chat template, in which it could be asked")
    switch = template.switch
    if pipeline.chat_format.reasoning is not None and switch is None:
        raise unsupported("model", "thinks before it answers, so its first token says nothing")
    encoded = [
        await tokenizer.encode("model", word, add_special_tokens=False) for word in (YES, NO)
    ]
    yes, no = (token_ids[0] if token_ids else None for token_ids in encoded)
    if yes is None or no is None or yes == no:
        raise unsupported("model", f"has no tokens that tell {YES!r} from {NO!r}")
    return AnswerTokens(yes, no, Rendering(kwargs={} if switch is None else {switch: False}))


def _ranked(body: RerankBody, found: list[Relevance]) -> dict[str, Any]:
    """The documents, most relevant first; equal ones in the order of the request."""
    order = sorted(range(len(found)), key=lambda index: -found[index].score)
    results: list[dict[str, Any]] = []
    for index in order[: body.top_n]:
        result: dict[str, Any] = {"index": index, "relevance_score": found[index].score}
        if body.return_documents:
            result["document"] = {"text": body.documents[index].text}
        results.append(result)
    return {"results": results, "usage": _usage(found), "meta": {"api_version": {"version": "2"}}}


def _usage(found: list[Relevance]) -> dict[str, int]:
    num_tokens = sum(relevance.num_prompt_tokens for relevance in found)
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
