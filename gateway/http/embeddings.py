"""POST /v1/embeddings: texts in, vectors out."""

import base64
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from fastapi import Request
from fastapi.responses import Response
from pydantic import PlainValidator
from pydantic import WithJsonSchema as JsonSchema

from gateway.errors import limits
from gateway.errors.request_errors import unsupported
from gateway.http import fields
from gateway.http.completions import unless_disconnected
from gateway.http.headers import request_id_of, standing_of
from gateway.http.large_answers import answered, built
from gateway.http.schema import PROMPT_SCHEMA, Body, parse_prompts, to_truncation
from gateway.outputs.fan_out import embed_all
from gateway.pipeline.pipeline import Pipeline
from gateway.request.embeddings import PromptEmbedding
from gateway.request.generation import GenerationRequest, PrefixReuse, PromptPooling
from wire.logprobs import FLOAT32


def _parse_inputs(value: Any) -> list[str | tuple[int, ...]]:
    return parse_prompts("input", value, limits.MAX_EMBEDDING_INPUTS)


Inputs = Annotated[
    list[str | tuple[int, ...]], PlainValidator(_parse_inputs), JsonSchema(PROMPT_SCHEMA)
]


class EmbeddingBody(Body):
    """POST /v1/embeddings."""

    neutral: ClassVar[fields.Neutral] = fields.EMBEDDING

    input: Inputs
    model: str | None = None
    dimensions: int | None = None
    encoding_format: Literal["float", "base64"] = "float"
    pooling: Literal["last", "mean"] = "last"
    normalize: bool | None = None
    add_special_tokens: bool | None = None
    cache_salt: str | None = None
    priority: int | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    user: str | None = None
    request_id: str | None = None

    def to_requests(self, request_id: str) -> list[GenerationRequest]:
        """One request per input."""
        return [
            GenerationRequest(
                request_id=request_id if len(self.input) == 1 else f"{request_id}-{index}",
                prompt=prompt,
                add_special_tokens=self.add_special_tokens,
                model=self.model,
                reuse=PrefixReuse(self.cache_salt or ""),
                pooling=PromptPooling(self.pooling),
                truncation=to_truncation(self.truncate_prompt_tokens, self.truncation_side),
            )
            for index, prompt in enumerate(self.input)
        ]


async def embed(body: EmbeddingBody, request: Request, pipeline: Pipeline) -> Response:
    """Runs one HTTP request until its end, or until its client disconnects."""
    request_id = request_id_of(request.headers, body.request_id, "embd-")
    standing = standing_of(body, request.headers)

    def requests() -> list[GenerationRequest]:
        return [replace(one, standing=standing) for one in body.to_requests(request_id)]

    wanted = await built(pipeline, requests, num_parts=len(body.input))
    model = pipeline.resolve_model(body.model).name
    normalizes = body.normalize is not False
    found = await unless_disconnected(request, embed_all(pipeline, wanted, "input", normalizes))
    for embedding in found:
        check_size("dimensions", body.dimensions, len(embedding.vector))
    num_tokens = sum(embedding.usage.num_prompt_tokens for embedding in found)

    def whole() -> dict[str, Any]:
        data = [
            {"object": "embedding", "index": index, "embedding": written(body, embedding)}
            for index, embedding in enumerate(found)
        ]
        usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        return {"object": "list", "data": data, "model": model, "usage": usage}

    num_values = sum(embedding.vector.size for embedding in found)
    return await answered(pipeline, whole, num_values=num_values)


def check_size(field: str, asked: int | None, size: int) -> None:
    """Raises RequestError for a number of dimensions that is not the model's own."""
    if asked is not None and asked != size:
        raise unsupported(field, f"the vectors of this model have {size}, and no fewer")


def written(body: EmbeddingBody, embedding: PromptEmbedding) -> list[float] | str:
    """The vector as numbers, or as base64 of little-endian float32."""
    if body.encoding_format == "float":
        vector: list[float] = embedding.vector.tolist()
        return vector
    return base64.b64encode(embedding.vector.astype(FLOAT32).tobytes()).decode()
