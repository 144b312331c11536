"""Refuses requests that cannot be read, or hold too much or a bad number, before any handler.

One interceptor for asyncio servers and one for threads: every method of this project's services is
covered, those that are added later too. The status is INVALID_ARGUMENT; the message and a
BadRequest detail name the field.
"""

import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import grpc
from google.protobuf.any_pb2 import Any as Packed
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError, Message
from google.rpc.error_details_pb2 import BadRequest
from google.rpc.status_pb2 import Status

from wire.log_rate import FewPerSecond
from wire.requests.counts import TooMany, check_counts
from wire.requests.numbers import BadNumber, check_numbers
from wire.sealed import NO_MESSAGE

OWN_SERVICES = "/pagewire."
_INVALID = grpc.StatusCode.INVALID_ARGUMENT

Handler = Any  # grpc.RpcMethodHandler of any two messages
Metadata = tuple[tuple[str, bytes], ...]

log = logging.getLogger("wire.requests")
log.addFilter(FewPerSecond())


class Unreadable(ValueError):
    """Takes the place of a request whose bytes are no message of its type."""


class RequestCheck(grpc.aio.ServerInterceptor):
    """For asyncio servers."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """Wraps the handler of a method of this project."""
        handler = await continuation(handler_call_details)
        return _wrapped(handler, str(handler_call_details.method), _aio_behaviour)


class ThreadedRequestCheck(grpc.ServerInterceptor):
    """For servers with threads."""

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Handler],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """Wraps the handler of a method of this project."""
        handler = continuation(handler_call_details)
        return _wrapped(handler, str(handler_call_details.method), _threaded_behaviour)


def problem_of(request: Message | Unreadable) -> ValueError | None:
    """Why a request is refused; None when it may be handled."""
    if isinstance(request, Unreadable):
        return request
    try:
        check_numbers(request)
    except BadNumber as error:
        return error
    return None


def details_of(error: ValueError) -> Metadata:
    """The trailing metadata that names the field at fault, where one is."""
    if not isinstance(error, BadNumber):
        return ()
    violation = BadRequest.FieldViolation(field=error.field, description=str(error))
    packed = Packed()
    packed.Pack(BadRequest(field_violations=[violation]))
    status = Status(code=_INVALID.value[0], message=str(error), details=[packed])
    return (("grpc-status-details-bin", status.SerializeToString()),)


def _note(request: Message | Unreadable, error: ValueError) -> None:
    """Logs a refusal by the request's type and the field; the field is one of the contract's."""
    field = f", field {error.field}" if isinstance(error, BadNumber) else ""
    log.info("refused %s: %s%s", type(request).__name__, _INVALID.name, field)


def _wrapped(handler: Handler, method: str, wrap: Callable[[Handler], Any]) -> Handler:
    parse = None if handler is None else handler.request_deserializer
    if parse is None or not method.startswith(OWN_SERVICES):  # None: the handler reads bytes
        return handler
    kinds = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }
    make = kinds[handler.request_streaming, handler.response_streaming]
    kind = None if handler.request_streaming else getattr(parse, "__self__", None)
    read = _parser(parse, getattr(kind, "DESCRIPTOR", None))
    return make(wrap(handler), read, handler.response_serializer)


def _parser(
    parse: Callable[[bytes], Message], kind: Descriptor | None
) -> Callable[[bytes], Message | Unreadable]:
    """Parses messages; counts those of a kind before, which callers of one message send."""

    def read(data: bytes) -> Message | Unreadable:
        try:
            if kind is not None:
                check_counts(kind, data)
            return parse(data)
        except TooMany as error:
            return Unreadable(str(error))
        except DecodeError:  # its text says nothing that the caller could use
            return Unreadable(NO_MESSAGE)

    return read


# --- asyncio -------------------------------------------------------------------------------------


def _aio_behaviour(handler: Handler) -> Any:
    if handler.request_streaming:
        return _aio_stream_stream(handler.stream_stream)
    if handler.response_streaming:
        return _aio_unary_stream(handler.unary_stream)
    return _aio_unary_unary(handler.unary_unary)


def _aio_unary_unary(behaviour: Any) -> Any:
    async def answer(request: Any, context: Any) -> Any:
        await _aio_refuse_bad(request, context)
        return await behaviour(request, context)

    return answer


def _aio_unary_stream(behaviour: Any) -> Any:
    if inspect.iscoroutinefunction(behaviour):  # it writes its messages itself
        return _aio_unary_unary(behaviour)

    async def answer(request: Any, context: Any) -> AsyncIterator[Any]:
        await _aio_refuse_bad(request, context)
        responses = behaviour(request, context)
        try:
            async for response in responses:
                yield response
        finally:  # a call that is cancelled must not wait for the garbage collector
            await responses.aclose()

    return answer


def _aio_stream_stream(behaviour: Any) -> Any:
    """Messages of a stream are many requests: each is judged where it is read, by its handle."""

    async def readable(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        async for request in requests:
            if isinstance(request, Unreadable):
                await context.abort(_INVALID, str(request))
            yield request

    async def answer(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        responses = behaviour(readable(requests, context), context)
        try:
            async for response in responses:
                yield response
        finally:
            await responses.aclose()

    return answer


async def _aio_refuse_bad(request: Any, context: Any) -> None:
    if (problem := problem_of(request)) is not None:
        _note(request, problem)
        await context.abort(_INVALID, str(problem), details_of(problem))


# --- threads -------------------------------------------------------------------------------------


def _threaded_behaviour(handler: Handler) -> Any:
    if handler.request_streaming:
        return handler.stream_stream
    behaviour = handler.unary_stream or handler.unary_unary

    def answer(request: Any, context: Any) -> Any:
        if (problem := problem_of(request)) is not None:
            _note(request, problem)
            context.set_trailing_metadata(details_of(problem))
            context.abort(_INVALID, str(problem))
        return behaviour(request, context)

    def stream(request: Any, context: Any) -> Iterator[Any]:
        yield from answer(request, context)

    return stream if handler.response_streaming else answer
