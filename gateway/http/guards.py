"""The ASGI layer around the routes that asks for API keys, and names of places for logs."""

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.callers.auth import authenticate
from gateway.edge.error_answers import error_answer
from gateway.errors.request_errors import ErrorKind, RequestError
from gateway.http.routes import adapters
from gateway.page import live_routes as live
from gateway.page.routes import is_page_path
from wire.identity.access import CALLER, Access
from wire.identity.roles import Role

OPEN_PATHS = frozenset({"/health", "/ping", "/ready", "/docs"})  # /docs: the same for every gateway
OPERATORS_PATHS = frozenset({"/metrics"}) | live.OPERATORS_PATHS | adapters.OPERATORS_PATHS


class ApiKeyGuard:
    """Refuses requests without a user's key, or an operator's.

    Probes, /docs and the page's files need none: they are the same for all.
    """

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if scope["type"] == "http" and path not in OPEN_PATHS and not is_page_path(path):
            try:
                given = _authorization(Headers(scope=scope))
                role = Role.OPERATOR if path in OPERATORS_PATHS else Role.USER
                CALLER.set(authenticate(self._access, given, path, role))
            except RequestError as error:
                is_unknown = error.kind is ErrorKind.UNAUTHENTICATED
                challenge = {"www-authenticate": "Bearer"} if is_unknown else {}
                await error_answer(error, path, **challenge)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _authorization(headers: Headers) -> str | None:
    """The header, or Anthropic's `x-api-key` in its form where there is none."""
    if given := headers.getlist("authorization"):
        return ", ".join(given)
    keys = headers.getlist("x-api-key")
    return f"Bearer {', '.join(keys)}" if keys else None


METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


def place(scope: Scope) -> str:
    """Method and route of a request, for logs; what a caller may have written freely is a star."""
    route = getattr(scope.get("route"), "path", "*")
    method = scope.get("method", "")
    return f"{method if method in METHODS else '*'} {route}"
