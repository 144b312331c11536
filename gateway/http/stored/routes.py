"""GET and DELETE /v1/responses/{id}, and its input items."""

from typing import Any

from fastapi import FastAPI, Request

from gateway.errors import ErrorKind, RequestError, invalid, unsupported
from gateway.http.stored.kept import OFF, owner
from gateway.http.stored.store import ResponseStore

MOST_LISTED, DEFAULT_LISTED = 100, 20


def add_stored_routes(app: FastAPI, store: ResponseStore | None) -> None:
    """Adds the routes; without a store all that they name is not there."""

    def required() -> ResponseStore:
        if store is None:
            raise RequestError(ErrorKind.NOT_FOUND, f"response_id: {OFF}", field="response_id")
        return store

    @app.get("/v1/responses/{response_id}")
    async def stored_response(response_id: str, request: Request) -> dict[str, Any]:
        if request.query_params.get("stream", "false").lower() not in ("false", "0"):
            raise unsupported("stream", "a stored response is not streamed again")
        return required().body(owner(), response_id)

    @app.delete("/v1/responses/{response_id}")
    async def delete_response(response_id: str) -> dict[str, Any]:
        required().delete(owner(), response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    @app.get("/v1/responses/{response_id}/input_items")
    async def input_items(response_id: str, request: Request) -> dict[str, Any]:
        items = required().input_items(owner(), response_id)
        return _page(items, request.query_params)


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
