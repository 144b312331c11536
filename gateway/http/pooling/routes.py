"""POST /pooling, a prompt's vector in vLLM's form, and /classify, which no served model can do."""

import time
from dataclasses import replace
from typing import Any, ClassVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from gateway.errors.request_errors import invalid, unsupported
from gateway.http import fields
from gateway.http.completions import unless_disconnected
from gateway.http.embeddings import EmbeddingBody, check_size, written
from gateway.http.headers import request_id_of, standing_of
from gateway.outputs.fan_out import embed_all
from gateway.pipeline.pipeline import Pipeline

WHOLE = "embed"  # the task of one vector for the whole prompt
TASKS = ("token_embed", "classify", "token_classify", "plugin")


class PoolingBody(EmbeddingBody):
    """POST /pooling."""

    neutral: ClassVar[fields.Neutral] = fields.POOLING

    task: str | None = None

    def check_task(self) -> None:
        """Raises RequestError for all tasks but the one that the worker pools for."""
        if self.task == WHOLE:
            return
        if self.task is None:
            problem = f'is missing: by default each token has a vector, send "{WHOLE}" for one'
            raise unsupported("task", f"{problem} of the whole prompt")
        if self.task not in TASKS:
            raise invalid("task", f"must be one of {', '.join((WHOLE, *TASKS))}")
        raise unsupported("task", f'{self.task} is not supported by this server, only "{WHOLE}"')


class ClassifyBody(EmbeddingBody):
    """POST /classify."""

    neutral: ClassVar[fields.Neutral] = fields.POOLING


def add_pooling_routes(app: FastAPI, pipeline: Pipeline) -> None:
    """Adds both routes."""

    @app.post("/pooling")
    async def pooling(body: PoolingBody, request: Request) -> Response:
        return await _pool(body, request, pipeline)

    @app.post("/classify")
    async def classify(body: ClassifyBody) -> Response:
        pipeline.resolve_model(body.model)
        raise unsupported("model", "has no classification head: it writes text")


async def _pool(body: PoolingBody, request: Request, pipeline: Pipeline) -> Response:
    """Runs one HTTP request until its end, or until its client disconnects."""
    body.check_task()
    request_id = request_id_of(request.headers, body.request_id, "pool-")
    standing = standing_of(body, request.headers)
    wanted = [replace(one, standing=standing) for one in body.to_requests(request_id)]
    head: dict[str, Any] = {
        "id": request_id,
        "object": "list",
        "created": int(time.time()),
        "model": pipeline.resolve_model(body.model).name,
    }
    normalizes = body.normalize is not False
    found = await unless_disconnected(request, embed_all(pipeline, wanted, "input", normalizes))
    for one in found:
        check_size("dimensions", body.dimensions, len(one.vector))
    num_tokens = sum(one.usage.num_prompt_tokens for one in found)
    entries = [
        {"index": index, "object": "pooling", "data": written(body, one)}
        for index, one in enumerate(found)
    ]
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens, "completion_tokens": 0}
    return JSONResponse(head | {"data": entries, "usage": usage})
