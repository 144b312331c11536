"""An asyncio gRPC server that no method name can end.

grpc.aio (1.85) decodes the name of a method that is not registered in its serving loop: one call
whose path is not UTF-8 ends the loop, and with it the server and all its calls. Here such calls,
known to be of no method, are answered with UNIMPLEMENTED without looking at their names. All
methods must therefore be registered, as generated code does; generic handlers alone are not found.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc
from grpc._cython import cygrpc  # type: ignore[attr-defined]

# A name for what is refused, in gRPC's own log.
_UNKNOWN = "/unknown"
Option = tuple[str, Any]


def aio_server(
    options: Sequence[Option] = (), interceptors: Sequence[grpc.aio.ServerInterceptor] = ()
) -> grpc.aio.Server:
    """A server like that of grpc.aio.server(); call it within a running loop."""
    server: Any = grpc.aio.server(options=list(options), interceptors=list(interceptors))
    server._server = _Server(
        asyncio.get_running_loop(), None, (), list(interceptors), tuple(options), None
    )
    return server  # type: ignore[no-any-return]


class _Server(cygrpc.AioServer):  # type: ignore[misc]
    """Takes calls of unregistered methods away from the serving loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *args: Any) -> None:
        super().__init__(loop, *args)
        self._event_loop = loop
        self._refusing: set[asyncio.Task[None]] = set()

    def _make_request_call_future(self, method: bytes | None) -> Any:
        if method is not None:
            return super()._make_request_call_future(method)
        self._keep(self._refuse_unregistered())
        return self._event_loop.create_future()  # never done; the loop cancels it at its end

    async def _refuse_unregistered(self) -> None:
        resolver = cygrpc._MethodResolver([], {})
        while self.is_running():
            try:
                call = await self._request_call()
            except cygrpc._RequestCallError:  # this call, or the server is shutting down
                continue
            refusal = cygrpc._handle_rpc(_UNKNOWN, resolver, (), call, self._event_loop, False)
            self._keep(cygrpc._schedule_rpc_coro(refusal, call, self._event_loop, _UNKNOWN))

    def _keep(self, work: Any) -> None:
        task = self._event_loop.create_task(work)
        self._refusing.add(task)
        task.add_done_callback(self._refusing.discard)
