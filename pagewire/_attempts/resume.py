"""Resuming a broken stream: when, and with which request. Pure except for the clock."""

import math
import random
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import grpc

from pagewire._connection.status_details import is_death, is_lost, retry_after_s
from pagewire.v1 import inference_pb2 as pb

FIRST_PAUSE_S = 0.1
MAX_PAUSE_S = 2.0
MAX_REQUEST_ID_BYTES = 256
MAX_DEATHS = 2  # of gateways in a row while the request ran, without a new token
MAX_DEATHS_IN_ALL = 16

_Request = TypeVar("_Request", pb.GenerateStreamRequest, pb.ChatStreamRequest)
_Call = TypeVar("_Call", covariant=True)

# Opens the stream again after these outputs, for this attempt and after so many deaths. The id is a
# new one, since the old one may still be live.
Reopen = Callable[[Sequence[pb.ResumedOutput], int, int], _Call]


def resumed(
    request: _Request, outputs: Sequence[pb.ResumedOutput], attempt: int, num_deaths: int = 0
) -> _Request:
    """The request for the rest of a stream of which this much has come, after so many deaths."""
    again = type(request)()
    again.CopyFrom(request)
    again.options.num_deaths = num_deaths
    if len(outputs) == 1:
        again.options.resume_token_ids[:] = outputs[0].token_ids
    elif any(output.token_ids or output.is_finished for output in outputs):
        again.options.resume_outputs.extend(outputs)
    if given := request.options.request_id:
        suffix = f"~{attempt}"
        again.options.request_id = given[: MAX_REQUEST_ID_BYTES - len(suffix)] + suffix
    return again


def jittered(pause_s: float) -> float:
    """A pause, longer by up to a half: callers that failed at once come back apart."""
    return pause_s * random.uniform(1.0, 1.5)


class Deadline:
    """The time limit of a call, however often its stream is opened."""

    def __init__(self, timeout_s: float) -> None:
        self._end_s = time.monotonic() + timeout_s

    @property
    def remaining_s(self) -> float:
        """Seconds left, at least a small number: gRPC then raises DeadlineExceeded."""
        return math.inf if math.isinf(self._end_s) else max(self._end_s - time.monotonic(), 1e-3)


class ResumePatience:
    """The failures of a stream that are retried, and the time for which they are.

    A stream that has had a message, or whose connection was lost, is retried; one that found no
    server is not, since that should be reported at once. Only when the connection or the server is
    lost, or the server is full on the retry; and only within the time limit since the last message,
    or since the beginning.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._began_s = time.monotonic()
        self._last_s: float | None = None  # time of the last message
        self._pause_s = FIRST_PAUSE_S
        self.num_attempts = 0
        self.num_deaths = 0  # of gateways in a row while the request ran, without a new token
        self.num_deaths_in_all = 0
        self._has_run = False  # in this attempt

    @property
    def is_poison(self) -> bool:
        """True if gateway after gateway died where the request ran."""
        return self.num_deaths >= MAX_DEATHS or self.num_deaths_in_all >= MAX_DEATHS_IN_ALL

    def note(self, has_tokens: bool = True) -> None:
        """Records the arrival of a message; one without tokens says that the request runs."""
        self._last_s, self._pause_s = time.monotonic(), FIRST_PAUSE_S
        self._has_run = True
        if has_tokens:
            self.num_deaths = 0

    def pause_s(self, error: grpc.RpcError) -> float | None:
        """Seconds to wait before the next attempt; None to give up."""
        is_gone = error.code() is grpc.StatusCode.UNAVAILABLE
        is_full = error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and self.num_attempts > 0
        if self._last_s is None and is_lost(error):
            self._last_s = self._began_s
        if self._last_s is None or not (is_gone or is_full):
            return None
        if is_gone and self._has_run and is_death(error):
            self.num_deaths += 1
            self.num_deaths_in_all += 1
        self._has_run = False
        if self.is_poison:
            return None
        if time.monotonic() - self._last_s + self._pause_s > self._timeout_s:
            return None
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, MAX_PAUSE_S)
        if is_gone:  # a queue keeps a place for the id that it refused
            self.num_attempts += 1
        return jittered(max(pause_s, (retry_after_s(error) or 0.0) if is_full else 0.0))
