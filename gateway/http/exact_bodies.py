"""JSON bodies whose decimals are told apart from others that have the same double."""

import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from gateway.structure.exact.numbers import read_number


class ExactRequest(Request):
    """A request whose JSON marks each decimal of which digits were lost."""

    async def json(self) -> Any:
        """The body; read once."""
        if not hasattr(self, "_json"):
            self._json = json.loads(await self.body(), parse_float=read_number)
        return self._json


class ExactRoute(APIRoute):
    """A route that reads its body so."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler of requests."""
        handle = super().get_route_handler()

        async def handler(request: Request) -> Response:
            return await handle(ExactRequest(request.scope, request.receive))

        return handler
