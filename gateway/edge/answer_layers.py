"""ASGI layers around all others: the path's prefix, HEAD, and the name and count of each answer."""

from collections.abc import Awaitable
from typing import cast

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.callers.request_ids import PREFIX, REQUEST_ID, current_id, new_id, plain_or_none
from gateway.observe.meter import RequestMetrics
from wire.logs.request import about


class AnswerNames:
    """Names each answer by its request's id, and counts it by route and status.

    Both when the head is written; nothing per message.
    """

    def __init__(self, app: ASGIApp, metrics: RequestMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # A route may give it another name, of the body or of its own kind.
        about(plain_or_none(Headers(scope=scope).get(REQUEST_ID)) or new_id(PREFIX))
        has_begun = False

        # Not a coroutine of its own: one more per message would cost more than all else here.
        def named(message: Message) -> Awaitable[None]:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                self._metrics.answered(scope["path"], message["status"])
                name = (REQUEST_ID.encode(), current_id().encode())
                message["headers"] = [*message.get("headers", ()), name]
            return send(message)

        try:
            await self._app(scope, receive, named)
        except Exception:  # the framework answers it after all layers have ended
            if not has_begun:
                self._metrics.answered(scope["path"], 500)
            raise


class HeadAsGet:
    """Answers HEAD as GET, without the body, which the server leaves out."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return
        has_ended = False

        async def send_head(message: Message) -> None:
            nonlocal has_ended
            if has_ended:
                return
            has_ended = True  # a stream hears of it as of a client that left
            await send(message)
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        await self._app(dict(scope, method="GET"), receive, send_head)


class PathPrefix:
    """Takes a prefix from the paths of requests, which a proxy may have left there."""

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        self._app = app
        self._prefix = prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = cast(str, scope.get("path", ""))
        if path == self._prefix or path.startswith(f"{self._prefix}/"):
            # All layers and routes see the paths of this gateway: keys are asked for by them.
            bare = path.removeprefix(self._prefix) or "/"
            raw = cast(bytes, scope.get("raw_path") or b"").removeprefix(self._prefix.encode())
            scope = dict(scope, path=bare, raw_path=raw or b"/")
        await self._app(scope, receive, send)
