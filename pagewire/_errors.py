"""Errors of a call.

    PagewireError
    |-- InvalidArgument      a field has an invalid value, or can never fit; the message names it
    |-- NotFound             the model does not exist
    |-- FailedPrecondition   the state of things forbids it: its id is live, or an LLM cannot start
    |-- Overloaded           the queue is full; retry_after_s says when to retry
    |-- Unavailable          no server answers, or no worker is ready
    |-- DeadlineExceeded     the call took longer than timeout_s
    |-- Cancelled            the call was cancelled on this side
    |-- Aborted              the server aborted the request
    |-- InvalidOutput        a model class refused the output, although it has its form
    |-- Unauthenticated      the API key is missing or wrong
    |-- PermissionDenied     the API key does not permit the call
    |-- Unimplemented        the server does not implement the call
    `-- Internal             the server failed

One table maps every gRPC status to its class.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from pagewire._connection.status_details import retry_after_s


class PagewireError(Exception):
    """A failed call. `code` is the name of the gRPC status."""

    def __init__(
        self, message: str, *, code: str = "UNKNOWN", retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.retry_after_s = retry_after_s


class InvalidArgument(PagewireError, ValueError):
    """A field has an invalid value, or a prompt can never fit; the message names the field.

    It is a ValueError, too.
    """


class NotFound(PagewireError):
    """The model does not exist."""


class FailedPrecondition(PagewireError):
    """The state of things forbids the call: its id is that of a live request, for example."""


class Overloaded(PagewireError):
    """The queue is full. `retry_after_s` is the server's advice in seconds, or None."""


class Unavailable(PagewireError):
    """No server answers at the address, or no worker is ready."""


class DeadlineExceeded(PagewireError):
    """The call took longer than timeout_s."""


class Cancelled(PagewireError):
    """The call was cancelled on this side."""


class Aborted(PagewireError):
    """The server aborted the request."""


class InvalidOutput(PagewireError):
    """The output has the form of its model class, whose own validation refused it.

    `text` is the output; the error of the validation is the `__cause__`.
    """

    def __init__(self, message: str, *, text: str = "") -> None:
        super().__init__(message)
        self.text = text


class Unauthenticated(PagewireError):
    """The API key is missing or wrong."""


class PermissionDenied(PagewireError):
    """The API key may not do this."""


class Unimplemented(PagewireError):
    """The server does not implement the call or the feature."""


class Internal(PagewireError):
    """The server failed, or sent an invalid answer."""


BY_STATUS: dict[grpc.StatusCode, type[PagewireError]] = {
    grpc.StatusCode.CANCELLED: Cancelled,
    grpc.StatusCode.UNKNOWN: Internal,
    grpc.StatusCode.INVALID_ARGUMENT: InvalidArgument,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.ALREADY_EXISTS: FailedPrecondition,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    grpc.StatusCode.FAILED_PRECONDITION: FailedPrecondition,
    grpc.StatusCode.ABORTED: Aborted,
    grpc.StatusCode.OUT_OF_RANGE: InvalidArgument,
    grpc.StatusCode.UNIMPLEMENTED: Unimplemented,
    grpc.StatusCode.INTERNAL: Internal,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.DATA_LOSS: Internal,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
}


def from_rpc_error(error: grpc.RpcError, target: str) -> PagewireError:
    """The exception for a failed call to `target`, blocking or asyncio."""
    code = error.code()
    text = error.details() or code.name
    if code is grpc.StatusCode.UNAVAILABLE and "Failed to connect" in text:
        text = f"nothing answers at {target}: is the server running? ({text.split(': ')[-1]})"
    elif code is grpc.StatusCode.DEADLINE_EXCEEDED:
        text = f"no complete answer from {target} in time ({text})"
    return BY_STATUS[code](text, code=code.name, retry_after_s=retry_after_s(error))


@contextmanager
def translated(target: str) -> Iterator[None]:
    """Raises gRPC errors inside the block as exceptions of this module."""
    try:
        yield
    except grpc.RpcError as error:
        raise from_rpc_error(error, target) from None
