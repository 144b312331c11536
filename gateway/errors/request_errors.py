"""Errors of requests, and the table of their HTTP and gRPC forms.

Code inside the gateway raises `RequestError`; only the API layers (HTTP and gRPC) read the table.
"""

import logging
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import grpc

log = logging.getLogger("gateway")


class ErrorKind(Enum):
    """Why a request was refused or failed."""

    INVALID = auto()
    UNSUPPORTED = auto()
    TOO_LONG = auto()
    UNAUTHENTICATED = auto()
    FORBIDDEN = auto()
    NOT_FOUND = auto()
    MODEL_NOT_FOUND = auto()
    METHOD_NOT_ALLOWED = auto()
    CONFLICT = auto()
    TOO_SLOW = auto()
    BODY_TOO_LARGE = auto()
    UNSUPPORTED_ENCODING = auto()
    HEADERS_TOO_LARGE = auto()
    CANCELLED = auto()
    OVERLOADED = auto()
    UNIMPLEMENTED = auto()
    UNAVAILABLE = auto()
    DEADLINE_EXCEEDED = auto()
    POISON = auto()  # process after process died where it was computed
    INTERNAL = auto()


@dataclass(frozen=True, slots=True)
class Wire:
    """The HTTP and gRPC form of one kind of error."""

    http_status: int
    grpc_code: grpc.StatusCode
    type: str
    code: str


_REQUEST = "invalid_request_error"
_SERVER = "server_error"
_Code = grpc.StatusCode

WIRE: dict[ErrorKind, Wire] = {
    ErrorKind.INVALID: Wire(400, _Code.INVALID_ARGUMENT, _REQUEST, "invalid_value"),
    ErrorKind.UNSUPPORTED: Wire(400, _Code.INVALID_ARGUMENT, _REQUEST, "unsupported_parameter"),
    ErrorKind.TOO_LONG: Wire(400, _Code.INVALID_ARGUMENT, _REQUEST, "context_length_exceeded"),
    ErrorKind.UNAUTHENTICATED: Wire(401, _Code.UNAUTHENTICATED, _REQUEST, "invalid_api_key"),
    ErrorKind.FORBIDDEN: Wire(403, _Code.PERMISSION_DENIED, _REQUEST, "forbidden"),
    ErrorKind.NOT_FOUND: Wire(404, _Code.NOT_FOUND, _REQUEST, "not_found"),
    ErrorKind.MODEL_NOT_FOUND: Wire(404, _Code.NOT_FOUND, _REQUEST, "model_not_found"),
    ErrorKind.METHOD_NOT_ALLOWED: Wire(405, _Code.UNIMPLEMENTED, _REQUEST, "method_not_allowed"),
    ErrorKind.CONFLICT: Wire(409, _Code.ALREADY_EXISTS, _REQUEST, "conflict"),
    ErrorKind.TOO_SLOW: Wire(408, _Code.DEADLINE_EXCEEDED, _REQUEST, "request_timeout"),
    ErrorKind.BODY_TOO_LARGE: Wire(413, _Code.RESOURCE_EXHAUSTED, _REQUEST, "request_too_large"),
    ErrorKind.UNSUPPORTED_ENCODING: Wire(
        415, _Code.INVALID_ARGUMENT, _REQUEST, "unsupported_encoding"
    ),
    ErrorKind.HEADERS_TOO_LARGE: Wire(431, _Code.RESOURCE_EXHAUSTED, _REQUEST, "headers_too_large"),
    ErrorKind.CANCELLED: Wire(499, _Code.CANCELLED, _REQUEST, "cancelled"),
    ErrorKind.OVERLOADED: Wire(429, _Code.RESOURCE_EXHAUSTED, "rate_limit_error", "overloaded"),
    ErrorKind.UNIMPLEMENTED: Wire(501, _Code.UNIMPLEMENTED, _REQUEST, "not_implemented"),
    ErrorKind.UNAVAILABLE: Wire(503, _Code.UNAVAILABLE, _SERVER, "unavailable"),
    ErrorKind.DEADLINE_EXCEEDED: Wire(504, _Code.DEADLINE_EXCEEDED, _SERVER, "deadline_exceeded"),
    ErrorKind.POISON: Wire(500, _Code.ABORTED, _SERVER, "request_poisonous"),
    ErrorKind.INTERNAL: Wire(500, _Code.INTERNAL, _SERVER, "internal_error"),
}

# Kinds that share a gRPC code; a code from the scheduler means these.
_KIND_OF_SHARED_CODE = {
    _Code.INVALID_ARGUMENT: ErrorKind.INVALID,
    _Code.NOT_FOUND: ErrorKind.NOT_FOUND,
    _Code.RESOURCE_EXHAUSTED: ErrorKind.OVERLOADED,
    _Code.UNIMPLEMENTED: ErrorKind.UNIMPLEMENTED,
    _Code.DEADLINE_EXCEEDED: ErrorKind.DEADLINE_EXCEEDED,
}
_KIND_OF_CODE: dict[int, ErrorKind] = {
    wire.grpc_code.value[0]: _KIND_OF_SHARED_CODE.get(wire.grpc_code, kind)
    for kind, wire in WIRE.items()
}
# A scheduler's own word for what no pool of blocks could ever hold.
_KIND_OF_CODE[_Code.FAILED_PRECONDITION.value[0]] = ErrorKind.TOO_LONG
_KIND_OF_HTTP_STATUS = {wire.http_status: kind for kind, wire in reversed(WIRE.items())}
_KIND_OF_HTTP_STATUS[500] = ErrorKind.INTERNAL

MOST_MESSAGE_CHARACTERS = 2048
MOST_FIELD_CHARACTERS = 256
MOST_SHOWN_CHARACTERS = 64

RETRY_AFTER_S = 1.0  # when the scheduler gives no time
OVERLOADED_STATUS = 529  # of Anthropic's API, where others say 503; no standard has it


class RequestError(Exception):
    """Refuses or fails one request, without effect on others.

    `field` is the caller's name of the field at fault, if it is one; `retry_after_s` is the
    scheduler's estimate, if it made one. The message is for clients: it tells no address of ours.
    """

    def __init__(
        self,
        kind: ErrorKind,
        message: str,
        *,
        field: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        message = _bounded(message, MOST_MESSAGE_CHARACTERS)
        super().__init__(message)
        self._retry_after_s = retry_after_s
        self.kind = kind
        # Names that a caller chose stand in both; a lone surrogate has no UTF-8.
        self.message = _encodable(message)
        self.field = None if field is None else _encodable(_bounded(field, MOST_FIELD_CHARACTERS))

    @property
    def wire(self) -> Wire:
        """The HTTP and gRPC form of this error."""
        return WIRE[self.kind]

    def renamed(self, field: str, other: str) -> "RequestError":
        """The same error with the field's name replaced, if `field` is at fault."""
        if self.field != field:
            return self
        message = self.message.replace(f"{field}:", f"{other}:", 1)
        return RequestError(self.kind, message, field=other, retry_after_s=self._retry_after_s)

    @property
    def retry_after_s(self) -> float | None:
        """Seconds after which to retry; None when a retry cannot help."""
        if self.kind not in (ErrorKind.OVERLOADED, ErrorKind.UNAVAILABLE):
            return None
        return RETRY_AFTER_S if self._retry_after_s is None else self._retry_after_s


def shown(text: str) -> str:
    """A value of a caller for a message, in quotes, or its beginning."""
    return (
        repr(text) if len(text) <= MOST_SHOWN_CHARACTERS else f"{text[:MOST_SHOWN_CHARACTERS]!r}..."
    )


def _bounded(text: str, most: int) -> str:
    """A text without its middle, if it is longer: what callers chose may be of any length."""
    if len(text) <= most:
        return text
    cut, end = " ... ", most // 4
    return f"{text[: most - end - len(cut)]}{cut}{text[-end:]}"


def _encodable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def error_body(error: RequestError) -> dict[str, Any]:
    """The JSON body of every error."""
    wire = error.wire
    inner = {
        "message": error.message,
        "type": wire.type,
        "param": error.field,
        "code": wire.code,
    }
    return {"error": inner}


def invalid(field: str, problem: str) -> RequestError:
    """An error for a field with an invalid value; the message starts with the field's name."""
    return RequestError(ErrorKind.INVALID, f"{field}: {problem}", field=field)


def unsupported(field: str, problem: str) -> RequestError:
    """An error for a valid field that is not supported here."""
    return RequestError(ErrorKind.UNSUPPORTED, f"{field}: {problem}", field=field)


def unavailable(reason: str) -> RequestError:
    """An error for a missing scheduler or worker."""
    return RequestError(ErrorKind.UNAVAILABLE, reason)


def poison(num_deaths: int) -> RequestError:
    """An error for a request at whose work process after process died."""
    message = f"{num_deaths} processes, one after the other, died while this request ran"
    return RequestError(ErrorKind.POISON, f"{message}; it is not submitted again")


def code_of(error: BaseException) -> str:
    """The failure of an output, by a name: an exception would keep all its frames alive."""
    if isinstance(error, RequestError):
        return error.wire.code
    kind = ErrorKind.INTERNAL if isinstance(error, Exception) else ErrorKind.CANCELLED
    return WIRE[kind].code


def ended_by(error: Exception) -> RequestError:
    """The error that a client gets for any exception; one that is no RequestError is logged."""
    if isinstance(error, RequestError):
        return error
    log.error("a request failed unexpectedly", exc_info=error)
    return RequestError(ErrorKind.INTERNAL, "internal error; the gateway's log says more")


def from_grpc_code(code: int, message: str, retry_after_s: float | None = None) -> RequestError:
    """The error for a status code from the scheduler; unknown codes are internal errors."""
    kind = _KIND_OF_CODE.get(code, ErrorKind.INTERNAL)
    field = "grammar" if kind is ErrorKind.INVALID and message.startswith("grammar: ") else None
    return RequestError(kind, message, field=field, retry_after_s=retry_after_s)


def from_http_status(status: int, message: str) -> RequestError:
    """The error for a status of the HTTP framework."""
    fallback = ErrorKind.INVALID if status < 500 else ErrorKind.INTERNAL
    return RequestError(_KIND_OF_HTTP_STATUS.get(status, fallback), message)
