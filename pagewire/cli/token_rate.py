"""The tokens a second that a scheduler computes now: between two of its status messages.

Its own clock counts, so the way of the messages takes no part in it.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from pagewire.v1 import scheduler_pb2

Status = scheduler_pb2.GetStatusResponse
PAUSE_S = 0.5  # between two messages, while requests run


@dataclass(frozen=True, slots=True)
class TokenRate:
    """Per second; of another start of the scheduler than before, there is none."""

    output: float
    prefill: float


def rate_between(before: Status, after: Status) -> TokenRate | None:
    """The rate from one message to a later one; None where no time has passed, or less tokens."""
    seconds = after.uptime_s - before.uptime_s
    output = after.num_output_tokens - before.num_output_tokens
    prefill = after.num_prefill_tokens - before.num_prefill_tokens
    if seconds <= 0 or output < 0 or prefill < 0:
        return None
    return TokenRate(output / seconds, prefill / seconds)


def rate_now(
    first: Status,
    ask_again: Callable[[], Status],
    before: Status | None,
    pause: Callable[[float], None] = time.sleep,
) -> tuple[Status, TokenRate | None]:
    """The newest message and the rate: since `before` if there is one, else after a pause."""
    if before is not None:
        return first, rate_between(before, first)
    if not (first.num_running or first.num_waiting):
        return first, TokenRate(0.0, 0.0)
    pause(PAUSE_S)
    second = ask_again()
    return second, rate_between(first, second)
