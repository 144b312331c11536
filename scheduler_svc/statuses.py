"""Trailing metadata of refusals for overload: a machine-readable time to retry."""

import math

import grpc
from google.protobuf.any_pb2 import Any as Packed
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status

Metadata = tuple[tuple[str, str | bytes], ...]


def overloaded_metadata(message: str, retry_after_s: float) -> Metadata:
    """RetryInfo for clients that read status details, and the pushback for gRPC's own retries."""
    millis = math.ceil(retry_after_s * 1e3)
    delay = Duration(seconds=millis // 1000, nanos=millis % 1000 * 1_000_000)
    packed = Packed()
    packed.Pack(RetryInfo(retry_delay=delay))
    code = grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
    status = Status(code=code, message=message, details=[packed])
    return (
        ("grpc-status-details-bin", status.SerializeToString()),
        ("grpc-retry-pushback-ms", str(millis)),
    )
