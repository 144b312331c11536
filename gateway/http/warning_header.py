"""The ASGI layer that tells callers, in a header, what their request asked for without effect."""

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.errors import notices

WARNING = "x-pagewire-warning"


class WarningHeader:
    """Adds the notices of a request, if there are any, to the headers of its answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        with notices.collected() as found:

            async def send_some(message: Message) -> None:
                if found and message["type"] == "http.response.start":
                    MutableHeaders(scope=message)[WARNING] = "; ".join(found)
                await send(message)

            await self._app(scope, receive, send_some)
