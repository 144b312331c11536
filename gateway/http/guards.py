"""ASGI layers around the routes: API key and size of bodies."""

from fastapi import HTTPException
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway import limits
from gateway.auth import ApiKey
from gateway.errors import RequestError
from gateway.http.events import error_body

OPEN_PATHS = frozenset({"/health", "/ready"})


class ApiKeyGuard:
    """Refuses requests without the key; probes need none."""

    def __init__(self, app: ASGIApp, api_key: ApiKey) -> None:
        self._app = app
        self._api_key = api_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            try:
                self._api_key.check(Headers(scope=scope).get("authorization"))
            except RequestError as error:
                challenge = {"www-authenticate": "Bearer"}
                body = error_body(error)
                refusal = JSONResponse(body, error.wire.http_status, headers=challenge)
                await refusal(scope, receive, send)
                return
        await self._app(scope, receive, send)


class BodyLimit:
    """Stops reading a body that is too large, regardless of its declared length."""

    def __init__(self, app: ASGIApp, max_bytes: int = limits.MAX_BODY_BYTES) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "0")
        num_bytes = 0

        async def receive_some() -> Message:
            nonlocal num_bytes
            if declared.isdecimal() and int(declared) > self._max_bytes:
                raise self._refusal()
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_bytes:
                raise self._refusal()
            return message

        await self._app(scope, receive_some, send)

    def _refusal(self) -> HTTPException:
        # The framework passes only this exception through when it reads a body.
        return HTTPException(413, f"the body exceeds {self._max_bytes} bytes")
