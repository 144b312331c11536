"""A step that never ends, ends the process: what waits in a kernel cannot be called back.

Heartbeats go on while the device hangs, and so do collectives inside a graph, for which no library
keeps a clock. The scheduler gives such a worker up; this makes room for one that works.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from worker_svc.ending import Ending, end_process

TICK_S = 0.25
# A process that was stopped itself cannot say how long its device took.
LONGEST_TICK_S = 2 * TICK_S


@dataclass(slots=True)
class _Running:
    step_id: int
    seconds: float = 0.0


def _end(reason: str) -> None:
    end_process(Ending.STEP_OVERDUE, reason, with_stacks=True)


class StepLimit:
    """Knows which step each thread is in, and for how long. 0 seconds: no limit."""

    def __init__(self, limit_s: float = 0.0, end: Callable[[str], None] = _end) -> None:
        self._limit_s = limit_s
        self._end = end
        self._running: dict[int, _Running] = {}  # by thread

    def start(self) -> None:
        """Watches from now on, in a thread of its own."""
        if self._limit_s > 0:
            threading.Thread(target=self._watch, name="step-limit", daemon=True).start()

    @contextmanager
    def over(self, step_id: int) -> Iterator[None]:
        """Around what one thread does for one step: launching it, or waiting for it."""
        thread = threading.get_ident()
        self._running[thread] = _Running(step_id)
        try:
            yield
        finally:
            del self._running[thread]

    def tick(self, elapsed_s: float) -> None:
        """Time passes."""
        for running in list(self._running.values()):
            running.seconds += min(elapsed_s, LONGEST_TICK_S)
            if running.seconds > self._limit_s:
                self._end(f"step {running.step_id} has not ended within {self._limit_s:g} s")

    def _watch(self) -> None:
        before_s = time.monotonic()
        while True:
            time.sleep(TICK_S)
            now_s = time.monotonic()
            self.tick(now_s - before_s)
            before_s = now_s
