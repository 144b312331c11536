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
    """Watches the writes of handlers that are asynchronous generators.

    It makes a coroutine of each. As a server's last interceptor it spares the others, whose wrapped
    generators would each cost something per message.
    """

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
                with WriteWatch(self._timeout_s) as watch:
                    async for message in messages:
                        watch.began_s = watch.loop.time()
                        await context.write(message)
                        watch.began_s = None
                if watch.is_late:
                    log.warning("%s: a client does not read its stream", method)

        return watched


class WriteWatch:
    """Context manager of one task: leaves it when a write takes longer than the limit.

    One timer for all writes of a stream, which looks again when the current one would be late: a
    timer for each message, as asyncio.timeout has, costs more than to encode the message.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self.loop = asyncio.get_running_loop()
        self.began_s: float | None = None  # the write that has not ended
        self.is_late = False

    def __enter__(self) -> "WriteWatch":
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._timer = self.loop.call_later(self._timeout_s, self._look)
        return self

    def _look(self) -> None:
        left_s = self._timeout_s
        if self.began_s is not None:
            left_s += self.began_s - self.loop.time()
        if left_s > 0:
            self._timer = self.loop.call_later(left_s, self._look)
            return
        self.is_late = True
        self._task.cancel()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        """Swallows the cancellation that it asked for, and no other."""
        self._timer.cancel()
        is_ours = self.is_late and kind is asyncio.CancelledError
        return is_ours and self._task.uncancel() == 0


def _generates(behavior: Any) -> bool:
    return inspect.isasyncgenfunction(behavior)


def _codecs(handler: Any) -> tuple[Any, Any]:
    return handler.request_deserializer, handler.response_serializer
