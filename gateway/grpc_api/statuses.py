"""Maps errors to gRPC statuses, by the table in errors.py."""

import logging
import math
from collections.abc import Iterator
from contextvars import ContextVar
from functools import cache
from types import TracebackType
from typing import Any

import grpc
from google.protobuf.any_pb2 import Any as Packed
from google.protobuf.descriptor import Descriptor
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import BadRequest, RetryInfo
from google.rpc.status_pb2 import Status
from grpc_status import rpc_status

from gateway.errors import refusals
from gateway.errors.request_errors import ErrorKind, RequestError
from pagewire.v1 import debug_pb2, embedding_pb2, inference_pb2, types_pb2

Context = grpc.aio.ServicerContext[Any, Any]

METHOD: ContextVar[str] = ContextVar("METHOD", default="gRPC")  # that the current task serves

log = logging.getLogger("gateway.grpc_api.statuses")


def to_status(error: RequestError) -> grpc.Status:
    """The gRPC status of an error, with machine-readable details."""
    status = Status(code=error.wire.grpc_code.value[0], message=error.message)
    if error.field is not None:
        violation = BadRequest.FieldViolation(field=error.field, description=error.message)
        _attach(status, BadRequest(field_violations=[violation]))
    if error.retry_after_s is not None:
        delay = Duration()
        delay.FromMicroseconds(math.ceil(error.retry_after_s * 1e6))
        _attach(status, RetryInfo(retry_delay=delay))
    made: grpc.Status = rpc_status.to_status(status)
    return made


def _attach(status: Status, detail: BadRequest | RetryInfo) -> None:
    packed = Packed()
    packed.Pack(detail)
    status.details.append(packed)


@cache
def field_names() -> frozenset[str]:
    """The fields of all messages that callers send."""
    files = (debug_pb2, embedding_pb2, inference_pb2, types_pb2)
    messages = [m for file in files for m in file.DESCRIPTOR.message_types_by_name.values()]
    return frozenset(name for message in messages for name in _names_in(message))


def _names_in(message: Descriptor) -> Iterator[str]:
    yield from (field.name for field in message.fields)
    for nested in message.nested_types:
        yield from _names_in(nested)


class RefusalsAsStatuses:
    """Context manager for handlers: ends the call with the status of an error inside."""

    def __init__(self, context: Context) -> None:
        self._context = context

    async def __aenter__(self) -> None:
        pass

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if isinstance(error, RequestError):
            refusals.note(error, METHOD.get(), field_names())
            status = to_status(error)
            metadata = tuple(status.trailing_metadata or ())
            # Clients retry UNAVAILABLE by a policy of their own, with shorter pauses.
            if error.retry_after_s is not None and error.kind is ErrorKind.OVERLOADED:
                pushback_ms = math.ceil(error.retry_after_s * 1e3)
                metadata += (("grpc-retry-pushback-ms", str(pushback_ms)),)
            await self._context.abort(status.code, error.message, metadata)
        # Cancellation is no Exception and passes; an abort has its status already.
        elif isinstance(error, Exception) and not isinstance(error, grpc.aio.AbortError):
            log.error("a call failed unexpectedly", exc_info=error)
            problem = "internal error; the gateway's log says more"
            await self._context.abort(grpc.StatusCode.INTERNAL, problem)
