"""The ASGI layer that bounds a body while it is received: its bytes, its values and its memory."""

from collections.abc import Awaitable, Callable

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.callers.body_budget import BodyBudget, BodyShare
from gateway.edge.clients import client_at
from gateway.edge.edge_limits import EdgeLimits
from gateway.edge.json_count import JsonCount
from gateway.errors.request_errors import ErrorKind, RequestError


def body_budget(edge: EdgeLimits) -> BodyBudget:
    """The budget of these options."""
    return BodyBudget(edge.max_bodies_bytes, edge.max_bodies_bytes_per_client)


class BodyRefused(HTTPException):
    """Carries a refusal: the framework lets no other exception through while it reads a body."""

    def __init__(self, error: RequestError) -> None:
        super().__init__(error.wire.http_status, error.message)
        self.error = error


class BodyGuard:
    """Stops reading a body that exceeds a limit, regardless of its declared length."""

    def __init__(
        self,
        app: ASGIApp,
        edge: EdgeLimits,
        budget: BodyBudget,
        max_model_len: Callable[[], int],
    ) -> None:
        self._app = app
        self._edge = edge
        self._budget = budget
        self._max_model_len = max_model_len

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD"):
            await self._app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "0")
        address = (scope.get("client") or ("", 0))[0]
        with self._budget.share_of(client_at(address)) as share:
            body = _Body(self._edge, self._max_model_len(), share)

            async def receive_some() -> Message:
                if declared.isdecimal():
                    body.check_size(int(declared))
                message = await receive()
                if part := message.get("body", b""):
                    body.add(part)
                return message

            # Not a coroutine of its own: one more per message would cost more than all else here.
            def send_some(message: Message) -> Awaitable[None]:
                if message["type"] == "http.response.start":
                    share.give_back()
                return send(message)

            await self._app(scope, receive_some, send_some)


class _Body:
    """The part of one body that has come so far."""

    def __init__(self, edge: EdgeLimits, max_model_len: int, share: BodyShare) -> None:
        self._edge = edge
        self._most_marks = edge.max_body_values + max_model_len
        self._share = share
        self._num_bytes = 0
        self._count = JsonCount()

    def check_size(self, num_bytes: int) -> None:
        """Raises BodyRefused for a body of so many bytes, if they are too many."""
        if num_bytes > self._edge.max_body_bytes:
            problem = f"body: exceeds {self._edge.max_body_bytes} bytes (--max-body-mib)"
            raise BodyRefused(RequestError(ErrorKind.BODY_TOO_LARGE, problem))

    def add(self, part: bytes) -> None:
        """Counts the next bytes. Raises BodyRefused."""
        self._num_bytes += len(part)
        self.check_size(self._num_bytes)
        self._count.add(part)
        if self._count.num_marks > self._most_marks:
            problem = f"body: holds more than {self._most_marks} values (--max-body-values)"
            raise BodyRefused(RequestError(ErrorKind.BODY_TOO_LARGE, problem))
        try:
            self._share.hold(self._num_bytes, self._count.width)
        except RequestError as error:
            raise BodyRefused(error) from error
