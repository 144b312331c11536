"""Queries a server's standard gRPC health, without packages other than gRPC.

Its two messages have one field each, a string and an enum, both numbered 1: on the wire they equal
protobuf's wrapper types.
"""

from dataclasses import dataclass

import grpc
from google.protobuf.wrappers_pb2 import Int32Value, StringValue

from pagewire._channel import Connection, open_channel
from pagewire._errors import from_rpc_error

METHOD = "/grpc.health.v1.Health/Check"
SERVING = 1


@dataclass(frozen=True, slots=True)
class Health:
    """One answer, or the reason why there was none."""

    is_serving: bool
    reason: str  # empty when serving


def check(connection: Connection, timeout_s: float = 2.0) -> Health:
    """The health of a whole process."""
    with open_channel(connection) as channel:
        return check_on(channel, connection.target, timeout_s)


def check_on(channel: grpc.Channel, target: str, timeout_s: float = 2.0) -> Health:
    """As `check`, on a channel that stays open."""
    call = channel.unary_unary(
        METHOD,
        request_serializer=StringValue.SerializeToString,
        response_deserializer=Int32Value.FromString,
    )
    try:
        answer: Int32Value = call(StringValue(), timeout=timeout_s)
    except grpc.RpcError as error:
        return Health(is_serving=False, reason=str(from_rpc_error(error, target)))
    if answer.value == SERVING:
        return Health(is_serving=True, reason="")
    return Health(is_serving=False, reason="running, not ready yet")
