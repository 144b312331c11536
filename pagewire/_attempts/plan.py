"""A generating call between its arguments and gRPC: its attempts, and what becomes of its answer.

Does no IO, so both clients share it.
"""

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import grpc

from pagewire._attempts.resume import ResumePatience, resumed
from pagewire._attempts.retry import Attempts, RetryPolicy
from pagewire._channel import Connection, Terms
from pagewire._messages import answers, convert
from pagewire._messages.answers import Assembly
from pagewire._structure import ModelClass
from pagewire._types import CallOptions, Completion, SamplingParams
from pagewire.v1 import inference_pb2 as pb

_Whole = TypeVar("_Whole", pb.GenerateRequest, pb.ChatRequest)
_Streamed = TypeVar("_Streamed", pb.GenerateStreamRequest, pb.ChatStreamRequest)


class CallPlanner:
    """Plans the calls of one client."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._retries = RetryPolicy(connection.max_retries, connection.resume_timeout_s)

    def note_answer(self) -> None:
        """Records that the server has answered."""
        self._retries.has_answered = True

    def whole(
        self, request: _Whole, params: SamplingParams | None, options: CallOptions
    ) -> "WholeCall[_Whole]":
        """A call that returns the whole answer. Changes the request: gives it a key."""
        if self._retries.max_retries and not request.options.idempotency_key:
            request.options.idempotency_key = uuid.uuid4().hex
        return WholeCall(
            self._connection,
            self._attempts(options),
            request,
            options.get("metadata"),
            convert.to_model_class(params, options),
        )

    def stream(
        self, request: _Streamed, params: SamplingParams | None, options: CallOptions
    ) -> "StreamCallPlan[_Streamed]":
        """A streaming call. Changes the request: a queue keeps a place for an id."""
        if self._retries.max_retries and not request.options.request_id:
            request.options.request_id = f"gen-{uuid.uuid4().hex}"
        return StreamCallPlan(
            self._connection,
            self._attempts(options),
            request,
            options.get("metadata"),
            Assembly(request.options.n or 1, convert.to_model_class(params, options)),
            ResumePatience(self._connection.resume_timeout_s),
        )

    def _attempts(self, options: CallOptions) -> Attempts:
        timeout_s = options.get("timeout_s")
        return self._retries.attempts(
            self._connection.timeout_s if timeout_s is None else timeout_s
        )


@dataclass(frozen=True, slots=True)
class WholeCall(Generic[_Whole]):
    """A call that returns the whole answer, over all its attempts."""

    _connection: Connection
    _attempts: Attempts
    _request: _Whole
    _metadata: Mapping[str, str] | None
    _model: type[ModelClass] | None
    _began_s: float = field(default_factory=time.monotonic)

    @property
    def request(self) -> _Whole:
        """The request of the next attempt: the next gateway hears of deaths of earlier ones."""
        self._request.options.num_deaths = self._attempts.num_deaths
        return self._request

    @property
    def terms(self) -> Terms:
        """Deadline and metadata of the next attempt."""
        return self._connection.terms(self._attempts.deadline.remaining_s, self._metadata)

    def pause_s(self, error: grpc.RpcError) -> float:
        """Seconds to wait before the next attempt. Raises PagewireError when there is none."""
        return self._attempts.pause_s(error, self._connection.target)

    def completion(self, response: pb.GenerateResponse | pb.ChatResponse) -> Completion:
        """The value of the answer. Raises PagewireError."""
        self._attempts.note_answer()
        return answers.to_completion(response, self._began_s, self._model)


@dataclass(frozen=True, slots=True)
class StreamCallPlan(Generic[_Streamed]):
    """A streaming call, over all its attempts."""

    _connection: Connection
    attempts: Attempts  # until the first message
    _request: _Streamed
    _metadata: Mapping[str, str] | None
    assembly: Assembly
    patience: ResumePatience

    @property
    def target(self) -> str:
        """The address of the server, for messages."""
        return self._connection.target

    @property
    def terms(self) -> Terms:
        """Deadline and metadata of the next attempt."""
        return self._connection.terms(self.attempts.deadline.remaining_s, self._metadata)

    def request(
        self, outputs: Sequence[pb.ResumedOutput], attempt: int, num_deaths: int
    ) -> _Streamed:
        """The request of an attempt; the first, number 0, is the caller's."""
        if not attempt:
            return self._request
        return resumed(self._request, outputs, attempt, num_deaths)
