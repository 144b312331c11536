"""Ends the streams of clients that do not read them.

gRPC's flow control bounds what a stream that is not read costs; this bounds how long.
"""

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import grpc

Handler = Any  # grpc.RpcMethodHandler or None; its class takes no parameters at run time
Context = grpc.aio.ServicerContext[Any, Any]
Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Handler]]

log = logging.getLogger(__name__)


class SlowReaders(grpc.aio.ServerInterceptor):
    """Watches the writes of handlers that are asynchronous generators."""

    def __init__(self, write_timeout_s: float) -> None:
        self._timeout_s = write_timeout_s

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler:
        """The handler, with a time limit for each of its messages."""
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        if handler.unary_stream is not None and _generates(handler.unary_stream):
            watched = self._watched(handler.unary_stream, method)
            return grpc.unary_stream_rpc_method_handler(watched, *_codecs(handler))
        if handler.stream_stream is not None and _generates(handler.stream_stream):
            watched = self._watched(handler.stream_stream, method)
            return grpc.stream_stream_rpc_method_handler(watched, *_codecs(handler))
        return handler

    def _watched(self, behavior: Callable[[Any, Context], AsyncIterator[Any]], method: str) -> Any:
        async def watched(request: Any, context: Context) -> None:
            # Closed here, so that what the handler holds is free at once.
            async with aclosing(behavior(request, context)) as messages:  # type: ignore[type-var]
                async for message in messages:
                    try:
                        async with asyncio.timeout(self._timeout_s):
                            await context.write(message)
                    except TimeoutError:
                        log.warning("%s: a client does not read its stream", method)
                        return

        return watched


def _generates(behavior: Any) -> bool:
    return inspect.isasyncgenfunction(behavior)


def _codecs(handler: Any) -> tuple[Any, Any]:
    return handler.request_deserializer, handler.response_serializer
