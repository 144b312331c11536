"""When a service that died is started again, and when it is given up. Pure: time comes in.

The first restart is immediate. After that the pauses grow, until the service has been ready for a
while.
"""

FIRST_PAUSE_S = 0.5
MOST_PAUSE_S = 10.0
SETTLED_S = 10.0  # ready for so long, a service has not died because of its start
MOST_UNREADY = 5  # deaths in a row before it was ready
MOST_SHORT = 20  # deaths in a row before it had settled
FREE = 3  # short lives without a pause: it may be others that kill it


class Restarts:
    """The deaths of one service."""

    def __init__(self) -> None:
        self._num_unready = 0
        self._num_short = 0

    def died(self, ready_s: float | None) -> float | None:
        """Seconds until the next start; None to give up.

        `ready_s` is for how long it was ready; None if it never was.
        """
        self._num_unready = self._num_unready + 1 if ready_s is None else 0
        has_settled = ready_s is not None and ready_s >= SETTLED_S
        self._num_short = 0 if has_settled else self._num_short + 1
        if self._num_unready >= MOST_UNREADY or self._num_short >= MOST_SHORT:
            return None
        num_pauses = max(self._num_unready - 1, self._num_short - FREE)
        return min(FIRST_PAUSE_S * 2 ** (num_pauses - 1), MOST_PAUSE_S) if num_pauses > 0 else 0.0

    @property
    def summary(self) -> str:
        """The number of times that it died in a row."""
        if self._num_unready >= MOST_UNREADY:
            return f"died {self._num_unready} times in a row before it was ready"
        return f"died {self._num_short} times in a row, each time soon after it was ready"
