"""Sending a call again: which failures permit it, when, and how often.

Two kinds do. A refusal (the queue is full, no worker is ready, no server where one was before)
says that nothing ran. A connection that broke says nothing, so what ran is found again by the
call's idempotency key.
"""

import time

import grpc

from pagewire._attempts.resume import FIRST_PAUSE_S, MAX_DEATHS, MAX_PAUSE_S, Deadline, jittered
from pagewire._connection.status_details import is_death, is_lost, is_unreached, retry_after_s
from pagewire._errors import Aborted, PagewireError, from_rpc_error

MAX_ADVICE_S = 60.0  # a call that would wait longer is the program's to decide about
_FULL = grpc.StatusCode.RESOURCE_EXHAUSTED
_LIVES_ELSEWHERE = grpc.StatusCode.ALREADY_EXISTS


class RetryPolicy:
    """The most that one client's calls are sent again, and whether it has reached its server."""

    def __init__(self, max_retries: int, lost_timeout_s: float) -> None:
        self.max_retries = max_retries
        self.lost_timeout_s = lost_timeout_s
        self.has_answered = False  # a server that never has is reported at once

    def attempts(self, timeout_s: float) -> "Attempts":
        """The attempts of a new call with this time limit."""
        return Attempts(self, Deadline(timeout_s))


class Attempts:
    """The attempts of one call."""

    def __init__(self, policy: RetryPolicy, deadline: Deadline) -> None:
        self._policy = policy
        self.deadline = deadline
        self._num_refusals = 0
        self._pause_s = FIRST_PAUSE_S
        self._lost_s: float | None = None  # since when the connection is lost
        self.num_deaths = 0  # of gateways that may have been the call's doing

    def note_answer(self) -> None:
        """Records that the server has answered."""
        self._policy.has_answered = True

    def pause_s(self, error: grpc.RpcError, target: str) -> float:
        """Seconds to wait before the next attempt. Raises PagewireError when there is none."""
        pause_s = self._lost_pause_s(error, target)
        if pause_s is None:
            pause_s = self.refusal_pause_s(error)
        if pause_s is None:
            raise from_rpc_error(error, target) from None
        return pause_s

    def refusal_pause_s(self, error: grpc.RpcError) -> float | None:
        """Seconds to wait after a refusal; None if it is none, or the last one."""
        pause_s = self._advice_s(error)
        if pause_s is None or self._num_refusals >= self._policy.max_retries:
            return None
        self._num_refusals += 1
        return pause_s if pause_s < self.deadline.remaining_s else None

    def _advice_s(self, error: grpc.RpcError) -> float | None:
        advice_s = retry_after_s(error)
        if advice_s is not None and error.code() in (_FULL, grpc.StatusCode.UNAVAILABLE):
            return jittered(advice_s) if advice_s <= MAX_ADVICE_S else None
        if is_unreached(error) and self._policy.has_answered:
            return self._backoff_s()
        return None

    def _lost_pause_s(self, error: grpc.RpcError, target: str) -> float | None:
        """Seconds to wait for a connection that is lost, or was lost and is not back."""
        limit_s = self._policy.lost_timeout_s if self._policy.max_retries else 0.0
        now_s = time.monotonic()
        if is_lost(error) and limit_s:
            self._lost_s = now_s  # anew: it was back
            self.num_deaths += is_death(error)
            if self.num_deaths >= MAX_DEATHS:
                if not self._policy.has_answered:  # perhaps no gateway: TLS on one side alone
                    return None
                raise _poison(self.num_deaths) from None
        elif not (is_unreached(error) or error.code() is _LIVES_ELSEWHERE):
            return None
        if self._lost_s is None:
            return None
        pause_s = self._backoff_s()
        is_late = now_s - self._lost_s + pause_s > limit_s
        return None if is_late or pause_s >= self.deadline.remaining_s else pause_s

    def _backoff_s(self) -> float:
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, MAX_PAUSE_S)
        return jittered(pause_s)


def _poison(num_deaths: int) -> PagewireError:
    problem = f"{num_deaths} gateways, one after the other, died while this request was with them"
    return Aborted(f"{problem}; it is not submitted again", code="ABORTED")
