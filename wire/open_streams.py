"""Bounds the streams of methods that need no identity: reflection, and watching a server's health.

Their callers may be anyone. So they are counted apart from all other calls and end after a time:
however many are opened, the calls of services and operators find their places.
"""

import asyncio
import inspect
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing
from functools import partial
from queue import Empty, SimpleQueue
from threading import Semaphore, Thread
from typing import Any

import grpc

from wire.identity.roles import METHOD_ROLES, Role

MOST_IN_THREADS, MOST_ON_LOOP = 8, 256  # of one server
REFLECTION_S = 60.0
WATCH_S = 3600.0  # clients that follow a server's health begin anew

Handler = Any  # grpc.RpcMethodHandler or None; its class takes no parameters at run time
_FULL = "{} streams of methods that need no key are open; try again later"
_OVER = "a stream of this method ends after {:.0f} s; open another one"


def _limit_s(handler: Handler, method: str) -> float | None:
    """Seconds that a stream of the method may be open; None for methods not bounded here."""
    if handler is None or not handler.response_streaming:
        return None
    if METHOD_ROLES.get(method) is not Role.OPEN:
        return None
    return WATCH_S if method.endswith("/Watch") else REFLECTION_S


def _remade(handler: Handler, behaviour: Any) -> Handler:
    streams = bool(handler.request_streaming)
    kinds = grpc.unary_stream_rpc_method_handler, grpc.stream_stream_rpc_method_handler
    return kinds[streams](behaviour, handler.request_deserializer, handler.response_serializer)


def _behaviour(handler: Handler) -> Any:
    return handler.stream_stream if handler.request_streaming else handler.unary_stream


class AioOpenStreams(grpc.aio.ServerInterceptor):
    """The interceptor for grpc.aio. It returns a coroutine, so SlowReaders does not watch it."""

    def __init__(self, most: int = MOST_ON_LOOP) -> None:
        self._most = most
        self._num_open = 0

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """The handler, bounded if it needs no identity."""
        handler = await continuation(handler_call_details)
        limit_s = _limit_s(handler, str(handler_call_details.method))
        if limit_s is None:
            return handler
        return _remade(handler, partial(self._serve, _behaviour(handler), limit_s))

    async def _serve(self, behaviour: Any, limit_s: float, request: Any, context: Any) -> None:
        if self._num_open >= self._most:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, _FULL.format(self._most))
        self._num_open += 1
        try:
            async with asyncio.timeout(limit_s):
                await _answer(behaviour, request, context)
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, _OVER.format(limit_s))
        finally:
            self._num_open -= 1


async def _answer(behaviour: Any, request: Any, context: Any) -> None:
    if not inspect.isasyncgenfunction(behaviour):
        await behaviour(request, context)
        return
    answers: AsyncIterator[Any] = behaviour(request, context)
    async with aclosing(answers) as messages:  # type: ignore[type-var]
        async for message in messages:
            await context.write(message)


class ThreadedOpenStreams(grpc.ServerInterceptor):
    """The interceptor for threaded servers, whose streams hold a thread each."""

    def __init__(self, most: int = MOST_IN_THREADS) -> None:
        self._most = most
        self._free = Semaphore(most)

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Handler],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """The handler, bounded if it needs no identity."""
        handler = continuation(handler_call_details)
        limit_s = _limit_s(handler, str(handler_call_details.method))
        if limit_s is None:
            return handler
        return _remade(handler, partial(self._serve, _behaviour(handler), limit_s))

    def _serve(self, behaviour: Any, limit_s: float, request: Any, context: Any) -> Iterator[Any]:
        if not self._free.acquire(blocking=False):
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, _FULL.format(self._most))
        try:
            yield from _until(limit_s, behaviour, request, context)
        finally:
            self._free.release()


def _until(limit_s: float, behaviour: Any, request: Any, context: Any) -> Iterator[Any]:
    """The handler's messages, which another thread waits for: none has to come for it to end."""
    messages: SimpleQueue[Any] = SimpleQueue()
    over = object()

    def run() -> None:
        try:
            for message in behaviour(request, context):
                messages.put(message)
        except grpc.RpcError:  # gRPC's sign that the call is over
            pass
        except Exception as error:
            messages.put(error)
        messages.put(over)

    if not context.add_callback(partial(messages.put, over)):
        return
    Thread(target=run, name="open-stream", daemon=True).start()
    ends_s = time.monotonic() + limit_s
    while True:
        try:
            message = messages.get(timeout=max(0.0, ends_s - time.monotonic()))
        except Empty:
            context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, _OVER.format(limit_s))
        if message is over:
            return
        if isinstance(message, Exception):
            raise message
        yield message
