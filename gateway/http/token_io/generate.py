"""POST /inference/v1/generate: token ids of a prompt in, token ids of its outputs out."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from gateway.http.completions import streamed, unless_disconnected
from gateway.http.events import DONE, event, finish_fields, usage_body
from gateway.http.headers import request_id_of, standing_of
from gateway.http.large_answers import answered
from gateway.http.logprobs import as_id, as_text, chat_logprobs, prompt_logprobs
from gateway.http.session_hints import session_of
from gateway.http.token_io.bodies import TEXT, GenerateTokensBody
from gateway.outputs.fan_out import complete_all, generate_all
from gateway.pipeline.pipeline import Pipeline
from gateway.request.choices import total_usage
from gateway.request.generation import GenerationRequest, OutputDelta, Usage, WholeOutput


async def generate_tokens(
    body: GenerateTokensBody, request: Request, pipeline: Pipeline
) -> Response:
    """Runs one HTTP request until its end, or until its client disconnects."""
    answer_id = request_id_of(request.headers, body.request_id, "")
    standing, session = standing_of(body, request.headers), await session_of(request)
    wanted = [one.of(standing, session) for one in body.to_requests(answer_id)]
    form = TokensForm(answer_id, has_text=body.output_mode == TEXT)
    if body.stream:
        options = body.stream_options
        has_usage = bool(options is not None and options.include_usage)
        events = _events(pipeline, wanted, form, has_usage=has_usage)
        return await streamed(request, events)
    outputs = await unless_disconnected(request, complete_all(pipeline, wanted))
    usage = total_usage([output.finish.usage for output in outputs], len(outputs))

    def whole() -> dict[str, Any]:
        choices = [form.choice(index, output) for index, output in enumerate(outputs)]
        return form.answer(choices) | form.about_prompt(outputs[0], usage)

    return await answered(pipeline, whole, num_values=sum(one.num_values for one in outputs))


class TokensForm:
    """The JSON form of answers in token ids; with `has_text` their text comes, too."""

    def __init__(self, answer_id: str, *, has_text: bool) -> None:
        self._head = {"request_id": answer_id, "output_mode": "text" if has_text else "tokens"}
        self._has_text = has_text

    def answer(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """An answer, or a chunk of one, with these choices."""
        return self._head | {"choices": choices}

    def choice(self, index: int, output: WholeOutput | OutputDelta) -> dict[str, Any]:
        """An output, or the new part of one."""
        name = as_text if self._has_text else as_id
        logprobs = chat_logprobs(output.logprobs, name) if output.logprobs else None
        end: dict[str, Any] = {"finish_reason": None, "stop_reason": None}
        if output.finish is not None:
            end = finish_fields(output.finish)
        text = {"text": output.text} if self._has_text else {}
        ids = list(output.token_ids)
        return {"index": index, "token_ids": ids, **text, "logprobs": logprobs, **end}

    def about_prompt(self, output: WholeOutput, usage: Usage) -> dict[str, Any]:
        """Fields that a whole answer has once for all its choices."""
        scores = None if output.prompt is None else output.prompt.scores
        name = as_text if self._has_text else as_id
        return {
            "prompt_logprobs": None if scores is None else prompt_logprobs(scores, name),
            "kv_transfer_params": None,
            "usage": usage_body(usage),
        }


async def _events(
    pipeline: Pipeline, wanted: list[GenerationRequest], form: TokensForm, *, has_usage: bool
) -> AsyncGenerator[bytes, None]:
    usages: dict[int, Usage] = {}
    async with aclosing(generate_all(pipeline, wanted)) as deltas:
        async for delta in deltas:
            if delta.finish is not None:
                usages[delta.choice] = delta.finish.usage
            elif not delta.token_ids:
                continue
            yield event(form.answer([form.choice(delta.choice, delta)]))
    if has_usage:
        in_order = [usages[index] for index in sorted(usages)]
        usage = usage_body(total_usage(in_order, len(wanted)))
        yield event(form.answer([]) | {"usage": usage})
    yield DONE
