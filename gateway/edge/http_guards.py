"""ASGI layers around the routes: requests per client, encodings of bodies."""

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.edge.clients import OpenRequests
from gateway.edge.error_answers import error_answer
from gateway.errors.request_errors import ErrorKind, RequestError

IDENTITY = ("", "identity")


class ClientLimit:
    """Refuses requests with a body of a client that has too many open. Probes have no body."""

    def __init__(self, app: ASGIApp, open_requests: OpenRequests) -> None:
        self._app = app
        self._open = open_requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD"):
            await self._app(scope, receive, send)
            return
        address = (scope.get("client") or ("", 0))[0]
        try:
            with self._open.one_of(address):
                await self._app(scope, receive, send)
        except RequestError as error:
            await _refuse(error, scope, receive, send)


class PlainBodies:
    """Refuses compressed bodies: a small one may become very large."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            encoding = Headers(scope=scope).get("content-encoding", "")
            if encoding.strip().lower() not in IDENTITY:
                problem = "content-encoding: compressed bodies are not read"
                error = RequestError(
                    ErrorKind.UNSUPPORTED_ENCODING, problem, field="content-encoding"
                )
                await _refuse(error, scope, receive, send)
                return
        await self._app(scope, receive, send)


async def _refuse(error: RequestError, scope: Scope, receive: Receive, send: Send) -> None:
    await error_answer(error, scope["path"])(scope, receive, send)
