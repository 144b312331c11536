"""Step streams whose scheduler has not said hello: each holds a thread, so there are few.

One more ends the oldest of them. A scheduler says hello at once, so it is not the one
that is ended.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

MOST_PENDING = 8


class PendingHellos:
    """The streams that wait for their first frame. For all threads of the service."""

    def __init__(self, most: int = MOST_PENDING) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._ends: dict[int, Callable[[], object]] = {}  # oldest first
        self._newest = 0

    @contextmanager
    def waiting(self, end: Callable[[], object]) -> Iterator[None]:
        """Counts a stream, which `end` ends from another thread, while it waits."""
        with self._lock:
            self._newest += 1
            number = self._newest
            self._ends[number] = end
            oldest = min(self._ends) if len(self._ends) > self._most else None
            end_oldest = self._ends.pop(oldest) if oldest is not None else None
        if end_oldest is not None:
            end_oldest()
        try:
            yield
        finally:
            with self._lock:
                self._ends.pop(number, None)
