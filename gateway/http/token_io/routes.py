"""The routes of the three steps: text to ids, ids to ids, ids to text."""

from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response

from gateway.http.events import CHAT, COMPLETION
from gateway.http.schema import ChatCompletionBody, CompletionBody
from gateway.http.token_io.bodies import (
    DerenderChatBody,
    DerenderCompletionBody,
    GenerateTokensBody,
)
from gateway.http.token_io.derender import Derenderer
from gateway.http.token_io.generate import generate_tokens
from gateway.http.token_io.render import rendered
from gateway.pipeline.pipeline import Pipeline
from gateway.tokens.tokenizer import Tokenizer


def add_token_io_routes(app: FastAPI, pipeline: Pipeline, tokenizer: Tokenizer) -> None:
    """Adds all five."""
    derenderer = Derenderer(pipeline, tokenizer)

    @app.post("/inference/v1/generate")
    async def inference_generate(body: GenerateTokensBody, request: Request) -> Response:
        return await generate_tokens(body, request, pipeline)

    @app.post("/v1/chat/completions/render")
    async def render_chat(body: ChatCompletionBody, request: Request) -> dict[str, Any]:
        (one,) = await rendered(body, request, pipeline, CHAT.id_prefix)
        return one

    @app.post("/v1/completions/render")
    async def render_completion(body: CompletionBody, request: Request) -> list[dict[str, Any]]:
        return await rendered(body, request, pipeline, COMPLETION.id_prefix)

    @app.post("/v1/chat/completions/derender")
    async def derender_chat(body: DerenderChatBody) -> dict[str, Any]:
        return await derenderer.chat(body)

    @app.post("/v1/completions/derender")
    async def derender_completion(body: DerenderCompletionBody) -> dict[str, Any]:
        return await derenderer.completion(body)
