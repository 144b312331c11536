"""When a stream that broke is opened again, and what is asked for then. Pure but for the clock."""

import math
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import grpc

from pagewire.v1 import inference_pb2 as pb

FIRST_PAUSE_S = 0.1
MAX_PAUSE_S = 2.0
MAX_REQUEST_ID_BYTES = 256

_Request = TypeVar("_Request", pb.GenerateStreamRequest, pb.ChatStreamRequest)
_Call = TypeVar("_Call", covariant=True)

# Opens the stream again, behind these tokens; the name is new, for the old one may still be live.
Reopen = Callable[[Sequence[int], int], _Call]


def resumed(request: _Request, token_ids: Sequence[int], attempt: int) -> _Request:
    """The request for what is behind these tokens of its output."""
    again = type(request)()
    again.CopyFrom(request)
    again.options.resume_token_ids[:] = token_ids
    if given := request.options.request_id:
        suffix = f"~{attempt}"
        again.options.request_id = given[: MAX_REQUEST_ID_BYTES - len(suffix)] + suffix
    return again


def patience_for(
    request: pb.GenerateStreamRequest | pb.ChatStreamRequest, timeout_s: float
) -> "Patience":
    """None for several outputs: one alone can be asked for behind its tokens."""
    return Patience(timeout_s if request.options.n <= 1 else 0.0)


class Deadline:
    """When a call has to be over, however often its stream is opened."""

    def __init__(self, timeout_s: float) -> None:
        self._end_s = time.monotonic() + timeout_s

    @property
    def remaining_s(self) -> float:
        """Seconds left, at least a moment: gRPC then says that time is up."""
        return math.inf if math.isinf(self._end_s) else max(self._end_s - time.monotonic(), 1e-3)


class Patience:
    """Which failures of a stream are sat out, and for how long.

    Only of a stream that has brought something, for a server that cannot be reached at all should
    be told at once; only when the server or the way there is gone, or it is full when the stream
    comes back; and only as long as was said since the last message.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._last_s: float | None = None  # of the last message
        self._pause_s = FIRST_PAUSE_S
        self.num_attempts = 0

    def note(self) -> None:
        """A message came."""
        self._last_s, self._pause_s = time.monotonic(), FIRST_PAUSE_S

    def pause_s(self, error: grpc.RpcError) -> float | None:
        """How long to wait before the next attempt; None when there is none."""
        is_gone = error.code() is grpc.StatusCode.UNAVAILABLE
        is_full = error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and self.num_attempts > 0
        if self._last_s is None or not (is_gone or is_full):
            return None
        if time.monotonic() - self._last_s + self._pause_s > self._timeout_s:
            return None
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, MAX_PAUSE_S)
        self.num_attempts += 1
        return pause_s
