"""A transport that is closed only once the client has sent its request.

The kernel resets a connection that is closed with bytes unread, and the reset may overtake the
answer: the client then sees a broken connection in place of a refusal.
"""

import asyncio
from collections.abc import Callable
from typing import Any


class LingeringTransport:
    """All of a transport but `close`, which may have to wait for the rest of a request."""

    def __init__(self, transport: asyncio.Transport, expects_more: Callable[[], bool]) -> None:
        self._transport = transport
        self._expects_more = expects_more
        self.is_lingering = False

    def __getattr__(self, name: str) -> Any:
        """Whatever else a transport does."""
        return getattr(self._transport, name)

    def close(self) -> None:
        """Ends the answer; the connection too, unless more of the request is to come."""
        if self._transport.is_closing() or not self._expects_more():
            self._transport.close()
            return
        if not self.is_lingering and self._transport.can_write_eof():
            self._transport.write_eof()
        self.is_lingering = True

    def close_at_once(self) -> None:
        """Closes although bytes may be unread."""
        self._transport.close()
