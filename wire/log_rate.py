"""Keeps a log that callers can fill short: a few lines a second, and the number of those left out.

A filter of `logging`, for a logger with one kind of line.
"""

import logging
import time
from collections.abc import Callable


class FewPerSecond(logging.Filter):
    """Passes the first lines of each second; the next one passed says how many were left out."""

    def __init__(self, most: int = 10, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._most = most
        self._clock = clock
        self._second = 0
        self._num_passed = self._num_left_out = 0

    def filter(self, record: logging.LogRecord) -> bool:
        """True if the line is written."""
        second = int(self._clock())
        if second != self._second:
            self._second, self._num_passed = second, 0
        if self._num_passed >= self._most:
            self._num_left_out += 1
            return False
        self._num_passed += 1
        if self._num_left_out:
            record.msg = f"{record.msg} ({self._num_left_out} such lines before it left out)"
            self._num_left_out = 0
        return True
