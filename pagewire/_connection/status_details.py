"""The part of a status for programs: its google.rpc details, and who made it.

The messages of google.rpc are not part of the protobuf package, so they are read and written by
field number.
"""

from collections.abc import Iterable
from datetime import timedelta
from typing import NamedTuple, cast

import grpc
from google.protobuf import any_pb2, duration_pb2, empty_pb2, message, unknown_fields

DETAILS = "grpc-status-details-bin"
_RETRY_INFO = "type.googleapis.com/google.rpc.RetryInfo"
# gRPC has no status of its own for a connection that broke or was refused, only these words.
_LOST = ("Socket closed", "Connection reset", "Broken pipe", "GOAWAY", "keepalive", "recvmsg")
_UNREACHED = ("failed to connect", "Connection refused", "connections to all backends failing")
# What gRPC itself says for a server that is asked to end; ours gives details.
_STOPPED = (
    *("shutting down", "has shut down", "stopping", "draining", "GOAWAY"),
    "Cancelling all calls",
)


def retry_after_s(error: grpc.RpcError) -> float | None:
    """Seconds after which the server says to come again; None if it does not."""
    try:
        return _retry_info_s(_details(error) or b"")
    except message.DecodeError:
        return None  # not parseable; the error itself matters more


def is_answer(error: grpc.RpcError) -> bool:
    """True if a gateway made this status, and no connection that broke: those have no details."""
    return _details(error) is not None


def is_lost(error: grpc.RpcError) -> bool:
    """True if a connection broke that there was: the request may have arrived."""
    return _is_of_connection(error, _LOST) and not is_unreached(error)


def is_unreached(error: grpc.RpcError) -> bool:
    """True if there was no connection: the request did not arrive."""
    return _is_of_connection(error, _UNREACHED)


def is_death(error: grpc.RpcError) -> bool:
    """True if the process at the other end is gone without having been asked to end."""
    is_gone = error.code() is grpc.StatusCode.UNAVAILABLE and not is_answer(error)
    return is_gone and not _is_of_connection(error, (*_STOPPED, *_UNREACHED))


def _is_of_connection(error: grpc.RpcError, words: Iterable[str]) -> bool:
    if error.code() is not grpc.StatusCode.UNAVAILABLE or is_answer(error):
        return False
    details = (error.details() or "").lower()
    return any(word.lower() in details for word in words)


class RetryStatus(NamedTuple):
    """A status with a time to come again, as a gRPC server sends it."""

    code: grpc.StatusCode
    details: str
    trailing_metadata: tuple[tuple[str, bytes], ...]


def retry_status(code: grpc.StatusCode, text: str, seconds: float) -> RetryStatus:
    """The status of a refusal that says when to come again."""
    delay = duration_pb2.Duration()
    delay.FromTimedelta(timedelta(seconds=seconds))
    info = any_pb2.Any(type_url=_RETRY_INFO, value=_field(1, delay.SerializeToString()))
    status = (
        bytes((0x08, code.value[0]))
        + _field(2, text.encode())
        + _field(3, info.SerializeToString())
    )
    return RetryStatus(code, text, ((DETAILS, status),))


def _field(number: int, value: bytes) -> bytes:
    """A field of bytes in protobuf's form."""
    length, encoded = len(value), bytearray((number << 3 | 2,))
    while length > 0x7F:
        encoded.append(length & 0x7F | 0x80)
        length >>= 7
    return bytes((*encoded, length)) + value


def _details(error: grpc.RpcError) -> bytes | None:
    read = getattr(error, "trailing_metadata", None)
    trailers = dict(cast(Iterable[tuple[str, str | bytes]], (read() if read else None) or ()))
    details = trailers.get(DETAILS)
    return details if isinstance(details, bytes) else None


def _retry_info_s(status: bytes) -> float | None:
    """Seconds in the google.rpc.RetryInfo of a google.rpc.Status; None without one."""
    for detail in _length_delimited(status, 3):
        entry = any_pb2.Any.FromString(detail)
        if entry.type_url.endswith("/google.rpc.RetryInfo"):
            for delay in _length_delimited(entry.value, 1):
                return duration_pb2.Duration.FromString(delay).ToTimedelta().total_seconds()
    return None


def _length_delimited(encoded: bytes, number: int) -> list[bytes]:
    fields = unknown_fields.UnknownFieldSet(empty_pb2.Empty.FromString(encoded))
    return [
        field.data
        for field in (fields[index] for index in range(len(fields)))
        if field.field_number == number and isinstance(field.data, bytes)
    ]
