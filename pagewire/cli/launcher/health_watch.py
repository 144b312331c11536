"""Asks one service for its health, again and again, and measures for how long it is silent.

Any answer ends a silence, "not ready" too: a scheduler without a worker is not ready, and alive.
How long a silence may be follows how long those were that ended well, as between the services
themselves (docs/failures.md).
"""

import grpc
from google.protobuf.wrappers_pb2 import Int32Value, StringValue

from pagewire._channel import Connection, open_channel
from pagewire.cli.health import METHOD, SERVING

INTERVAL_S = 0.5  # between an answer and the next question
STARTING_S = 0.1  # the same while it is not ready
QUESTION_S = 5.0  # for an answer; the next question may go over a new connection
LONGEST_TICK_S = 1.0
MARGIN = 3.0  # times the longest silence that ended well
MOST_SILENCE = 6.0  # times the least limit
HALF_LIFE_S = 60.0  # in which half of what was learned is forgotten
# What gRPC itself says for a server that cannot be reached, or does not answer.
NO_ANSWER = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


class HealthSilence:
    """The time for which a service has not answered, and its limit. Knows no clock."""

    def __init__(self, least_s: float) -> None:
        self._least_s = least_s
        self._learned_s = 0.0
        self.seconds = 0.0

    @property
    def limit_s(self) -> float:
        """A longer silence is a hang."""
        return min(max(self._least_s, self._learned_s), MOST_SILENCE * self._least_s)

    @property
    def is_too_long(self) -> bool:
        """True if the service hangs."""
        return self.seconds > self.limit_s

    def tick(self, elapsed_s: float) -> None:
        """Time passes. A long tick counts for little: then this process stood still itself."""
        self.seconds += min(elapsed_s, LONGEST_TICK_S)
        self._learned_s *= 0.5 ** (elapsed_s / HALF_LIFE_S)

    def end(self) -> None:
        """The service has answered."""
        self._learned_s = max(self._learned_s, MARGIN * self.seconds)
        self.seconds = 0.0


class HealthWatch:
    """One process's health; another process needs another watch."""

    def __init__(self, connection: Connection, least_s: float) -> None:
        self.silence = HealthSilence(least_s)
        self.is_serving = False
        self._channel = open_channel(connection)
        self._ask = self._channel.unary_unary(
            METHOD,
            request_serializer=StringValue.SerializeToString,
            response_deserializer=Int32Value.FromString,
        )
        self._question: grpc.Future[Int32Value] | None = None
        self._pause_s = 0.0

    def tick(self, elapsed_s: float) -> None:
        """Reads the answer, if it is there, and asks again when it is time."""
        self.silence.tick(elapsed_s)
        self._pause_s -= elapsed_s
        if self._question is not None and self._question.done():
            self._hear(self._question)
            self._question = None
        if self._question is None and self._pause_s <= 0:
            self._question = self._ask.future(StringValue(), timeout=QUESTION_S)

    def _hear(self, question: "grpc.Future[Int32Value]") -> None:
        error = question.exception()
        if error is None:
            self.is_serving = question.result().value == SERVING
        elif isinstance(error, grpc.RpcError) and error.code() in NO_ANSWER:
            return
        self.silence.end()
        self._pause_s = INTERVAL_S if self.is_serving else STARTING_S

    def close(self) -> None:
        """Stops asking."""
        self._channel.close()
