"""Reads bodies of requests: once in memory, large ones off the event loop, and decimals exactly."""

import asyncio
import json
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from gateway.structure.exact.numbers import read_number

INLINE_BYTES = 256 << 10  # what is shorter is parsed at once

# One: parsers keep the interpreter to themselves, and hold a large body as text meanwhile.
_PARSER = ThreadPoolExecutor(1, thread_name_prefix="json")


class BodyRequest(Request):
    """A request whose bytes are gone once they are parsed."""

    _received: bytearray | None = None

    async def body(self) -> bytearray:  # type: ignore[override]
        """The body. It grows in place: joining its parts would take its memory twice."""
        if self._received is None:
            self._received = bytearray()
            async for part in self.stream():
                self._received += part
        return self._received

    async def json(self) -> Any:
        """The body's value; decimals of which digits are lost are marked. Raises ValueError."""
        if not hasattr(self, "_json"):
            body = await self.body()
            if len(body) <= INLINE_BYTES:
                self._json = _parse(body)
            else:
                loop = asyncio.get_running_loop()
                self._json = await loop.run_in_executor(_PARSER, _parse, body)
        return self._json


def _parse(body: bytearray) -> Any:
    text = body.decode(json.detect_encoding(body), "surrogatepass")
    body.clear()
    return json.loads(text, parse_float=read_number)


class BodyRoute(APIRoute):
    """A route whose requests are read as above."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The framework's handler."""
        handle = super().get_route_handler()

        async def read(request: Request) -> Response:
            return await handle(BodyRequest(request.scope, request.receive))

        return read
