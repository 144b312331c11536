"""POST …/render: a chat or a completion as the body of the generate step, nothing computed."""

from dataclasses import replace
from typing import Any

from fastapi import Request

from gateway.http.headers import request_id_of
from gateway.http.schema import ChatCompletionBody, CompletionBody
from gateway.pipeline.pipeline import Pipeline
from gateway.request.generation import GenerationRequest, SamplingParams

# Of the sampling parameters, the names under which the generate step reads them.
RENAMED = {"num_top_logprobs": "logprobs", "num_prompt_logprobs": "prompt_logprobs"}


async def rendered(
    body: ChatCompletionBody | CompletionBody, request: Request, pipeline: Pipeline, prefix: str
) -> list[dict[str, Any]]:
    """One body of the generate step for each prompt. Raises RequestError."""
    answer_id = request_id_of(request.headers, body.request_id, f"{prefix}-")
    firsts = body.to_requests(answer_id)[:: body.num_choices]
    return [await _rendered(one, body, pipeline) for one in firsts]


async def _rendered(
    wanted: GenerationRequest, body: ChatCompletionBody | CompletionBody, pipeline: Pipeline
) -> dict[str, Any]:
    filled = replace(pipeline.sampling_defaults.fill(wanted), beams=None)
    submission, _ = await pipeline.prepare(filled)
    sampling = _sampling_body(submission.sampling, filled)
    if body.num_choices > 1:
        sampling["n"] = body.num_choices
        sampling.pop("seed", None)
        if body.seed is not None:
            sampling["seed"] = body.seed
    options = None if body.stream_options is None else body.stream_options.model_dump()
    return {
        "request_id": submission.request_id,
        "model": pipeline.resolve_model(body.model).name,
        "token_ids": submission.prompt_token_ids,
        "features": None,
        "sampling_params": sampling,
        "stream": bool(body.stream),
        "stream_options": options,
        "cache_salt": body.cache_salt,
        "priority": body.priority or 0,
        "kv_transfer_params": None,
    }


def _sampling_body(sampling: SamplingParams, wanted: GenerationRequest) -> dict[str, Any]:
    """The request's sampling parameters as JSON, without those that it leaves to the server."""
    values = {name: getattr(sampling, name) for name in sampling.__dataclass_fields__}
    grammar = values.pop("grammar")
    body: dict[str, Any] = {
        RENAMED.get(name, name): value
        for name, value in values.items()
        if value is not None and value != ()
    }
    if "logit_bias" in body:
        body["logit_bias"] = {str(token_id): bias for token_id, bias in body["logit_bias"]}
    if wanted.stop:
        body["stop"] = list(wanted.stop)
        body["include_stop_str_in_output"] = wanted.include_stop_str_in_output
    if not wanted.skip_special_tokens:
        body["skip_special_tokens"] = False
    if wanted.reuse.skip_prefix_cache:
        body["skip_prefix_cache"] = True
    if grammar:
        body["structured_outputs"] = {"llguidance": grammar}
    return body
