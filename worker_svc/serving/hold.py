"""The time for which the scheduler that holds this worker has not been heard.

A scheduler with a standby says a few times a second that it lives. The standby asks for this, and
takes the worker when the other has been silent for too long: between two schedulers it is the
workers that decide.
"""

import time
from collections.abc import Callable


class Hold:
    """The last word of the holder. Threads of the service may read and write it."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._heard_s: float | None = None

    def begin(self) -> None:
        """Another scheduler has attached, and has not spoken yet."""
        self._heard_s = None

    def hear(self, held_epoch: int, epoch: int) -> None:
        """A scheduler says that it lives; one with an epoch below the worker's is not heard."""
        if held_epoch and held_epoch >= epoch:
            self._heard_s = self._now_s()

    @property
    def unheard_ms(self) -> int | None:
        """Milliseconds since the last word; None if there was none."""
        heard_s = self._heard_s
        return None if heard_s is None else round(1e3 * (self._now_s() - heard_s))
