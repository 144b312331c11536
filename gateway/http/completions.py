"""POST /v1/chat/completions and /v1/completions: bodies in, answers or streams out."""

import asyncio
import time
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from functools import partial
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import Response

from gateway.errors.request_errors import ErrorKind, RequestError
from gateway.http.event_stream import OPENAI, EventStream, Waiting
from gateway.http.events import (
    ChunkWriter,
    Form,
    beside_choices,
    usage_body,
    whole_choice,
)
from gateway.http.headers import request_id_of, standing_of
from gateway.http.large_answers import answered, built
from gateway.http.schema import ChatCompletionBody, CompletionBody
from gateway.http.session_hints import session_of
from gateway.outputs.fan_out import complete_all, generate_all
from gateway.pipeline.pipeline import INLINE_VALUES, Pipeline
from gateway.request.choices import total_usage
from gateway.request.generation import GenerationRequest
from gateway.scheduler.submitted import SUBMITTED, Submitted

Result = TypeVar("Result")
VALUES_PER_CHOICE = 10  # in addition to its tokens


async def answer(
    form: Form, body: ChatCompletionBody | CompletionBody, request: Request, pipeline: Pipeline
) -> Response:
    """Runs one HTTP request until its end, or until its client disconnects."""
    answer_id = request_id_of(request.headers, body.request_id, f"{form.id_prefix}-")
    extras, num_choices = body.extras, body.num_choices
    standing, session = standing_of(body, request.headers), await session_of(request)

    def requests() -> list[GenerationRequest]:
        return [one.of(standing, session) for one in body.to_requests(answer_id)]

    num_prompts = len(body.prompt) if isinstance(body, CompletionBody) else 1
    wanted = await built(pipeline, requests, num_parts=num_prompts)
    head: dict[str, Any] = {
        "id": answer_id,
        "object": form.chunk_object if body.stream else form.whole_object,
        "created": int(time.time()),
        "model": pipeline.resolve_model(body.model).name,
    }
    if body.stream:
        writer = ChunkWriter(form, head, num_choices=num_choices, extras=extras)
        return await streamed(request, _events(pipeline, wanted, writer))
    computed = await unless_disconnected(request, complete_all(pipeline, wanted))
    shows_logprobs = body.logprobs is not None and body.logprobs is not False  # 0 is a number
    outputs = body.best.choose(computed, shows_logprobs=shows_logprobs)
    num_values = sum(output.num_values for output in outputs)

    def whole() -> dict[str, Any]:
        choices = [whole_choice(form, index, one, extras) for index, one in enumerate(outputs)]
        usage = usage_body(total_usage([one.finish.usage for one in outputs], num_choices))
        return {**head, "choices": choices, "usage": usage, **beside_choices(form, outputs, extras)}

    return await answered(pipeline, whole, num_values=num_values + VALUES_PER_CHOICE * len(outputs))


async def _events(
    pipeline: Pipeline, wanted: list[GenerationRequest], writer: ChunkWriter
) -> AsyncGenerator[bytes, None]:
    opened: set[int] = set()
    async with aclosing(generate_all(pipeline, wanted)) as deltas:
        async for delta in deltas:
            index = delta.choice
            if delta.prompt is not None and delta.prompt.num_values > INLINE_VALUES:
                chunk = await pipeline.run_aside(partial(writer.chunk, index, delta))
            else:
                chunk = writer.chunk(index, delta)
            if index not in opened:
                opened.add(index)
                chunk = writer.opening(index) + chunk
            if chunk:
                yield chunk
    yield writer.closing()


async def streamed(
    request: Request,
    events: AsyncGenerator[bytes, None],
    waiting: Waiting = OPENAI,
    *,
    is_admitted: bool = False,
) -> EventStream:
    """The events as an answer, once there is one: a refusal before the first is not a 200.

    Once the request is submitted, it does not wait for its first event longer than the interval of
    pings. One that is admitted was submitted before.
    """
    interval_s: float = request.app.state.keep_alive_s
    submitted = Submitted(is_admitted)
    SUBMITTED.set(submitted)
    first = asyncio.create_task(_first(events))
    leaving = asyncio.create_task(_disconnect(request))
    try:
        while not (first.done() or leaving.done()):
            done, _ = await asyncio.wait(
                (first, leaving),
                timeout=interval_s or None,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if not done and submitted.is_done:
                break
        if leaving.done() and not first.done():
            raise RequestError(ErrorKind.CANCELLED, "the client closed the connection")
        if first.done():
            first.result()
    except BaseException:
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        raise
    finally:
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
    return EventStream(first, events, waiting, interval_s)


async def _first(events: AsyncGenerator[bytes, None]) -> bytes:
    return await anext(events)


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Returns the result of `work`; cancels it and raises RequestError on a disconnect."""
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_disconnect(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise RequestError(ErrorKind.CANCELLED, "the client closed the connection")
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
