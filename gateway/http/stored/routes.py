"""GET and DELETE /v1/responses/{id}, and its input items."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from gateway.errors.request_errors import ErrorKind, RequestError, invalid, unsupported
from gateway.http.completions import streamed
from gateway.http.stored.background import BackgroundResponse, BackgroundResponses
from gateway.http.stored.kept import OFF, owner
from gateway.http.stored.store import ResponseStore

NOT_FOLLOWED = "only a response of the background is streamed again, and not for ever"
MOST_LISTED, DEFAULT_LISTED = 100, 20


def add_stored_routes(
    app: FastAPI,
    store: ResponseStore | None,
    background: BackgroundResponses,
    answers: dict[int | str, dict[str, Any]],
) -> None:
    """Adds the routes; without a store all that they name is not there."""

    def required() -> ResponseStore:
        if store is None:
            raise RequestError(ErrorKind.NOT_FOUND, f"response_id: {OFF}", field="response_id")
        return store

    @app.get("/v1/responses/{response_id}", responses=answers)
    async def stored_response(response_id: str, request: Request) -> Response:
        asked = request.query_params
        running = background.find(owner(), response_id)
        body = required().body(owner(), response_id) if running is None else running.body
        if asked.get("stream", "false").lower() in ("false", "0"):
            return JSONResponse(body)
        if running is None:
            raise unsupported("stream", NOT_FOLLOWED)
        after = _event_number(asked.get("starting_after"))
        return await streamed(request, _followed(running, after), is_admitted=True)

    @app.post("/v1/responses/{response_id}/cancel")
    async def cancel_response(response_id: str) -> dict[str, Any]:
        running = background.find(owner(), response_id)
        if running is None:
            found = required().body(owner(), response_id)
            if not found.get("background"):
                raise invalid("response_id", "is not a response of the background")
            return found
        await background.cancel(running)
        return running.body

    @app.delete("/v1/responses/{response_id}")
    async def delete_response(response_id: str) -> dict[str, Any]:
        running = background.find(owner(), response_id)
        if running is not None:
            await background.cancel(running)
            background.forget(response_id)
        required().delete(owner(), response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    @app.get("/v1/responses/{response_id}/input_items")
    async def input_items(response_id: str, request: Request) -> dict[str, Any]:
        items = required().input_items(owner(), response_id)
        return _page(items, request.query_params)


def _event_number(text: str | None) -> int | None:
    """The number of the last event that the client has. Raises RequestError."""
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal()):
        raise invalid("starting_after", "must be the number of an event")
    return int(text[:18])


async def _followed(running: BackgroundResponse, after: int | None) -> AsyncGenerator[bytes, None]:
    """The events after one, as a stream that has at least a comment."""
    yield b": following\n\n"
    async with aclosing(running.follow(after)) as events:
        async for event in events:
            yield event


def _page(items: list[dict[str, Any]], asked: Any) -> dict[str, Any]:
    """A part of the items, in OpenAI's form. Raises RequestError."""
    limit = asked.get("limit", str(DEFAULT_LISTED))
    if not limit.isdecimal() or not 1 <= int(limit[:9]) <= MOST_LISTED:
        raise invalid("limit", f"must be a number from 1 to {MOST_LISTED}")
    order = asked.get("order", "desc")
    if order not in ("asc", "desc"):
        raise invalid("order", "must be asc or desc")
    if order == "desc":
        items = items[::-1]
    if (after := asked.get("after")) is not None:
        ids = [item["id"] for item in items]
        if after not in ids:
            raise invalid("after", "is the id of none of the items")
        items = items[ids.index(after) + 1 :]
    listed = items[: int(limit)]
    return {
        "object": "list",
        "data": listed,
        "first_id": listed[0]["id"] if listed else None,
        "last_id": listed[-1]["id"] if listed else None,
        "has_more": len(items) > len(listed),
    }
