"""POST /v1/responses: OpenAI's newer API over the same chats."""

import json
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from gateway.chat.conversation import ToolChoice
from gateway.chat.parts import Part
from gateway.errors import limits
from gateway.errors.request_errors import RequestError, ended_by, error_body, unsupported
from gateway.http.completions import streamed, unless_disconnected
from gateway.http.event_stream import COMMENT, Waiting
from gateway.http.events import encode_json
from gateway.http.headers import given_id_of, standing_of
from gateway.http.response_body import ResponseBody, TextOptions
from gateway.http.response_items import COMPLETED, IN_PROGRESS, INCOMPLETE, Items
from gateway.http.response_tools.bodies import called_tools, is_left_out
from gateway.http.session_hints import session_of
from gateway.http.stored.background import BackgroundResponses
from gateway.http.stored.kept import Kept, kept_for, owner
from gateway.http.stored.recent import RecentItems
from gateway.http.stored.references import resolved
from gateway.http.stored.store import ResponseStore
from gateway.pipeline.pipeline import Pipeline
from gateway.request.generation import Finish, FinishReason, GenerationRequest, Usage, parts_of
from gateway.request.sampling_defaults import SamplingDefaults
from wire.logs.request import about


@dataclass(frozen=True, slots=True)
class Keeping:
    """The store of responses, and the tasks of those that no connection waits for."""

    store: ResponseStore | None = None  # None: nothing is stored
    background: BackgroundResponses = field(default_factory=BackgroundResponses)
    recent: RecentItems = field(default_factory=RecentItems)


async def respond(
    body: ResponseBody, request: Request, pipeline: Pipeline, keeping: Keeping
) -> Response:
    """Runs one HTTP request until its end, or until its client disconnects.

    In the background it runs on, and the answer says at once what it is called.
    """
    store = keeping.store
    given_id = given_id_of(request.headers, body.request_id)
    found = resolved(body.input, owner(), keeping.recent, store)
    body = body.model_copy(update={"input": found})
    kept = kept_for(body, given_id, store, keeping.recent)
    request_id = given_id or kept.response_id
    about(request_id)
    standing = standing_of(body, request.headers)
    session = kept.named(await session_of(request))
    wanted = body.to_request(request_id, kept.earlier).of(standing, session)
    model = pipeline.resolve_model(body.model).name
    head = _head(kept.response_id, model, body, pipeline.sampling_defaults)
    for name, value in head.items():  # what is repeated must be text
        limits.utf8(name, json.dumps(value, ensure_ascii=False))
    items = Items(called_tools(body.all_tools))
    if body.background:
        head["background"] = True
        _check_background(kept)
    answer = Answer(head | {"store": kept.store is not None}, items, kept.keep)
    if body.background:
        await pipeline.prepare(pipeline.sampling_defaults.fill(wanted))  # what is wrong is a 400
        events = _events_in_background(pipeline, wanted, answer)
        begun = keeping.background.start(owner(), answer.body, events, answer.cancel)
        if body.stream:
            return await streamed(request, begun.follow(None), is_admitted=True)
        return JSONResponse(answer.body)
    if body.stream:
        waiting = Waiting(COMMENT, lambda error: answer.fail(ended_by(error)))
        return await streamed(request, _events(pipeline, wanted, answer), waiting)
    whole = await unless_disconnected(request, pipeline.complete(wanted))
    answer.add(parts_of(whole))
    answer.end(whole.finish)
    return JSONResponse(answer.body)


class Answer:
    """One response as it grows, and its events."""

    def __init__(
        self, head: Mapping[str, Any], items: Items, keep: Callable[[dict[str, Any]], None]
    ) -> None:
        self.body: dict[str, Any] = dict(head)
        self._keep = keep
        self._items = items
        self._num_events = 0

    def begin(self) -> bytes:
        """The events before the first text."""
        return self._write(
            {"type": "response.created", "response": self.body},
            {"type": "response.in_progress", "response": self.body},
        )

    def add(self, parts: tuple[Part, ...]) -> bytes:
        """The events of further parts of the answer."""
        return self._write(*self._items.add(parts))

    def end(self, finish: Finish) -> bytes:
        """The events of the end; afterwards the body is the whole response."""
        status = COMPLETED if finish.reason is FinishReason.STOP else INCOMPLETE
        events = self._items.close(status)
        self.body["status"] = status
        if finish.reason is FinishReason.LENGTH:  # the API has no reason for an abort
            self.body["incomplete_details"] = {"reason": "max_output_tokens"}
        self.body["output"] = self._items.items
        self.body["usage"] = _usage_body(finish.usage)
        self._keep(self.body)  # before the client can ask for it
        return self._write(*events, {"type": f"response.{status}", "response": self.body})

    def cancel(self) -> bytes:
        """The events of an early end that its caller asked for."""
        return self._end_early("cancelled")

    def fail_in_background(self, error: RequestError) -> bytes:
        """The events of a failure that no connection waits for: the response tells of it."""
        inner = error_body(error)["error"]
        self.body["error"] = {name: inner[name] for name in ("code", "message")}
        return self._end_early("failed")

    def _end_early(self, status: str) -> bytes:
        events = self._items.close(INCOMPLETE)
        self.body["status"] = status
        self.body["output"] = self._items.items
        self._keep(self.body)
        return self._write(*events, {"type": f"response.{status}", "response": self.body})

    def fail(self, error: RequestError) -> bytes:
        """The event of an error after the stream has begun."""
        inner = error_body(error)["error"]
        fields = {name: inner[name] for name in ("code", "message", "param")}
        return self._write({"type": "error", **fields, "error": inner})

    def _write(self, *events: dict[str, Any]) -> bytes:
        written = []
        for event in events:
            numbered = encode_json({**event, "sequence_number": self._num_events})
            written.append(f"event: {event['type']}\ndata: {numbered}\n\n")
            self._num_events += 1
        return "".join(written).encode()


async def _events(
    pipeline: Pipeline, wanted: GenerationRequest, answer: Answer
) -> AsyncGenerator[bytes, None]:
    has_begun = False
    async with aclosing(pipeline.generate(wanted)) as deltas:
        async for delta in deltas:
            chunk = b"" if has_begun else answer.begin()
            chunk += answer.add(parts_of(delta))
            if delta.finish is not None:
                chunk += answer.end(delta.finish)
            if chunk:
                has_begun = True
                yield chunk


async def _events_in_background(
    pipeline: Pipeline, wanted: GenerationRequest, answer: Answer
) -> AsyncGenerator[bytes, None]:
    """The same events, begun at once; a failure is the last one."""
    yield answer.begin()
    try:
        async with aclosing(pipeline.generate(wanted)) as deltas:
            async for delta in deltas:
                chunk = answer.add(parts_of(delta))
                if delta.finish is not None:
                    chunk += answer.end(delta.finish)
                if chunk:
                    yield chunk
    except Exception as error:  # whatever it is, the response tells of it
        yield answer.fail_in_background(ended_by(error))


def _check_background(kept: Kept) -> None:
    """Raises RequestError for a response that could not be looked at."""
    if kept.store is None:
        problem = (
            "needs a store: a gateway with --store-responses, and a request without store: false"
        )
        raise unsupported("background", problem)


def _usage_body(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.num_cached_tokens},
        "output_tokens": usage.num_completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.num_reasoning_tokens},
        "total_tokens": usage.num_prompt_tokens + usage.num_completion_tokens,
    }


def _head(
    response_id: str, model: str, body: ResponseBody, defaults: SamplingDefaults
) -> dict[str, Any]:
    """Fields of a response that repeat its request, or are empty so far."""
    own: dict[str, float] = {"temperature": 1.0, "top_p": 1.0} | defaults.given()
    effort = None if body.reasoning is None else body.reasoning.effort
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "status": IN_PROGRESS,
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": effort, "summary": None},
        "temperature": own["temperature"] if body.temperature is None else body.temperature,
        "text": {"format": _format_body(body.text)},
        "tool_choice": _choice_body(body),
        "tools": [tool.model_dump() for tool in body.tools or () if not is_left_out(tool)],
        "top_p": own["top_p"] if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
    }


def _format_body(text: TextOptions | None) -> dict[str, Any]:
    if text is None or text.format is None:
        return {"type": "text"}
    return text.format.model_dump(by_alias=True, exclude_none=True)


def _choice_body(body: ResponseBody) -> Any:
    choice = body.tool_choice or ToolChoice()
    if choice.name is None:
        return choice.mode.value
    called = called_tools(body.tools or ()).get(choice.name)
    is_custom = called is not None and called.is_custom
    return {"type": "custom" if is_custom else "function", "name": choice.name}
