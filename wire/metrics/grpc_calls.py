"""Counts the calls of gRPC servers by method and status, as py-grpc-prometheus names them.

A call is counted at its begin and its end, never per message. An asyncio server's interceptor must
be its first one, followed by SlowReaders, which makes a coroutine of each handler that streams.
"""

import asyncio
import inspect
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
from google.protobuf import descriptor_pool

from wire.metrics.book import Book, Row
from wire.metrics.declared import SECONDS, Declared, MetricKind

Handler = Any  # grpc.RpcMethodHandler or None; its class takes no parameters at run time
STARTED = "grpc_server_started_total"
HANDLED = "grpc_server_handled_total"
SECONDS_OF = "grpc_server_handling_seconds"
_LABELS = ("grpc_type", "grpc_service", "grpc_method")
_KINDS = ("unary", "client_stream", "server_stream", "bidi_stream")


def _methods(services: Iterable[str]) -> dict[str, tuple[str, str, str]]:
    """The labels of each method of services whose contracts are loaded, by the method's path."""
    pool = descriptor_pool.Default()
    return {
        f"/{service}/{method.name}": (
            _KINDS[method.client_streaming + 2 * method.server_streaming],
            service,
            method.name,
        )
        for service in services
        for method in pool.FindServiceByName(service).methods
    }


def declared_calls(services: Iterable[str]) -> tuple[Declared, ...]:
    """The metrics of the calls of these services."""
    methods = tuple(_methods(services).values())
    codes = [code.name for code in grpc.StatusCode]
    by_code = tuple((*method, code) for method in methods for code in codes)
    return (
        Declared(MetricKind.COUNTER, STARTED, "Calls begun.", _LABELS, methods, is_sparse=True),
        Declared(
            MetricKind.COUNTER,
            HANDLED,
            "Calls ended, by status.",
            (*_LABELS, "grpc_code"),
            by_code,
            is_sparse=True,
        ),
        Declared(
            MetricKind.HISTOGRAM,
            SECONDS_OF,
            "Seconds from the begin to the end of a call.",
            _LABELS,
            methods,
            SECONDS,
            is_sparse=True,
        ),
    )


class CallCounts:
    """The cells of one server's calls."""

    def __init__(self, book: Book, row: Row, services: Iterable[str]) -> None:
        self._book = book
        self._row = row
        self._methods = _methods(services)
        self._lock = threading.Lock()  # a threaded server's calls end in any of its threads

    def knows(self, method: str) -> bool:
        """True if calls of the method, named by its path, are counted."""
        return method in self._methods

    @contextmanager
    def counted(self, method: str, context: Any) -> Iterator[None]:
        """Counts a call, whose handler runs inside, when it begins and when it ends."""
        with self._lock:
            self._row[self._book.at(STARTED, *self._methods[method])] += 1
        began_s, error = time.monotonic(), None
        try:
            yield
        except BaseException as raised:
            error = raised
            raise
        finally:
            self._ended(method, began_s, _code_of(context, error))

    def _ended(self, method: str, began_s: float, code: grpc.StatusCode) -> None:
        labels = self._methods[method]
        with self._lock:
            self._row[self._book.at(HANDLED, *labels, code.name)] += 1
            self._book.buckets(self._row, SECONDS_OF, *labels).observe(time.monotonic() - began_s)


def _code_of(context: Any, error: BaseException | None) -> grpc.StatusCode:
    """The status that a handler leaves, which may not have set any."""
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        return grpc.StatusCode.CANCELLED
    code = context.code()
    if not isinstance(code, grpc.StatusCode):
        code = next((one for one in grpc.StatusCode if one.value[0] == code), None)
    if error is not None and code in (None, grpc.StatusCode.OK):
        return grpc.StatusCode.UNKNOWN
    return code or grpc.StatusCode.OK


def _remade(handler: Handler, wrap: Callable[[Any], Any]) -> Handler:
    """The handler with its behaviour wrapped."""
    for name in ("unary_unary", "unary_stream", "stream_unary", "stream_stream"):
        if (behaviour := getattr(handler, name)) is not None:
            make = getattr(grpc, f"{name}_rpc_method_handler")
            codecs = handler.request_deserializer, handler.response_serializer
            return make(wrap(behaviour), *codecs)
    return handler


class AioCallCounter(grpc.aio.ServerInterceptor):
    """For grpc.aio."""

    def __init__(self, counts: CallCounts) -> None:
        self._counts = counts

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """The handler, counted."""
        handler, method = await continuation(handler_call_details), handler_call_details.method
        if handler is None or not self._counts.knows(method):
            return handler
        return _remade(handler, lambda behaviour: self._counted(behaviour, method))

    def _counted(self, behaviour: Callable[[Any, Any], Any], method: str) -> Any:
        if inspect.isasyncgenfunction(behaviour):
            raise TypeError(f"{method}: SlowReaders must come after this interceptor")

        async def counted(request: Any, context: Any) -> Any:
            with self._counts.counted(method, context):
                return await behaviour(request, context)

        return counted


class CallCounter(grpc.ServerInterceptor):
    """For threaded servers."""

    def __init__(self, counts: CallCounts) -> None:
        self._counts = counts

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Handler],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """The handler, counted."""
        handler, method = continuation(handler_call_details), str(handler_call_details.method)
        if handler is None or not self._counts.knows(method):
            return handler
        streams = bool(handler.response_streaming)
        wrap = self._counted_stream if streams else self._counted
        return _remade(handler, lambda behaviour: wrap(behaviour, method))

    def _counted(self, behaviour: Callable[[Any, Any], Any], method: str) -> Any:
        def counted(request: Any, context: Any) -> Any:
            with self._counts.counted(method, context):
                return behaviour(request, context)

        return counted

    def _counted_stream(self, behaviour: Callable[[Any, Any], Any], method: str) -> Any:
        def counted(request: Any, context: Any) -> Any:
            with self._counts.counted(method, context):
                yield from behaviour(request, context)

        return counted
