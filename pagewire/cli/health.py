"""`pagewire health`: a server's standard gRPC health, without packages other than gRPC.

Its two messages have one field each, a string and an enum, both numbered 1: on the wire they equal
protobuf's wrapper types.
"""

import argparse
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc
from google.protobuf.wrappers_pb2 import Int32Value, StringValue

from pagewire._channel import Connection, open_channel
from pagewire._errors import from_rpc_error
from pagewire.cli.options import add_command

if TYPE_CHECKING:
    from pagewire.cli.options import Subparsers

METHOD = "/grpc.health.v1.Health/Check"
SERVING = 1


@dataclass(frozen=True, slots=True)
class Health:
    """One answer, or the reason why there was none."""

    is_serving: bool
    reason: str  # empty when serving


def add_parser(commands: "Subparsers") -> None:
    """Adds the command."""
    parser = add_command(
        commands, "health", "Ask one service for its health; exits with 1 unless it is ready."
    )
    add = parser.add_argument
    add("address", metavar="HOST:PORT", help="its --health-port, or its port without TLS")
    add("--service", default="", metavar="NAME", help="`liveness`: whether the process answers")
    add("--timeout-s", type=float, default=2.0, help="time limit of the answer")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Prints why a service is not ready."""
    health = check(Connection(options.address), options.timeout_s, options.service)
    sys.stdout.write(f"{'ready' if health.is_serving else health.reason}\n")
    return 0 if health.is_serving else 1


def check(connection: Connection, timeout_s: float = 2.0, service: str = "") -> Health:
    """The health of a whole process, or of one of its services."""
    with open_channel(connection) as channel:
        return check_on(channel, connection.target, timeout_s, service)


def check_on(
    channel: grpc.Channel, target: str, timeout_s: float = 2.0, service: str = ""
) -> Health:
    """As `check`, on a channel that stays open."""
    call = channel.unary_unary(
        METHOD,
        request_serializer=StringValue.SerializeToString,
        response_deserializer=Int32Value.FromString,
    )
    try:
        answer: Int32Value = call(StringValue(value=service), timeout=timeout_s)
    except grpc.RpcError as error:
        return Health(is_serving=False, reason=str(from_rpc_error(error, target)))
    if answer.value == SERVING:
        return Health(is_serving=True, reason="")
    return Health(is_serving=False, reason="running, not ready yet")
