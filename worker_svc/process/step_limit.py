"""A step that never ends, ends the process: what waits in a kernel cannot be called back.

Heartbeats go on while the device hangs, and so do collectives inside a graph, for which no library
keeps a clock. The scheduler gives such a worker up; this makes room for one that works. How long is
too long follows what steps took here: a slow machine is no machine that hangs.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf

from wire.step_pace import StepPace
from worker_svc.process.exit_codes import Ending, end_process

TICK_S = 0.25
# A process that was stopped itself cannot say how long its device took.
LONGEST_TICK_S = 2 * TICK_S
# Without an option: the least limit by device, and times the time that a step of the size may take.
# A CPU does not hang as a GPU does; it is rather starved, or short of memory.
LEAST_S = {"cpu": 300.0, "cuda": 60.0}
PATIENCE = 30.0


@dataclass(slots=True)
class _Running:
    step_id: int
    num_tokens: int
    limit_s: float
    seconds: float = 0.0


def _end(reason: str) -> None:
    end_process(Ending.STEP_OVERDUE, reason, with_stacks=True)


class StepLimit:
    """Knows which step each thread is in, and for how long.

    A limit in seconds holds for every step, 0 is none; None follows the pace of the machine.
    """

    def __init__(self, limit_s: float | None = 0.0, end: Callable[[str], None] = _end) -> None:
        self._fixed_s = inf if limit_s == 0 else limit_s
        self._end = end
        self._least_s = max(LEAST_S.values())  # of a device not known yet
        self._pace = StepPace()
        self._running: dict[int, _Running] = {}  # by thread

    def start(self) -> None:
        """Watches from now on, in a thread of its own."""
        if self._fixed_s != inf:
            threading.Thread(target=self._watch, name="step-limit", daemon=True).start()

    def follow(self, device: str, rehearsed_s: Mapping[int, float]) -> None:
        """Sets the device, cpu or cuda, and the seconds of start-up's steps on it, by their
        tokens."""
        self._least_s, self._pace = LEAST_S[device], StepPace()
        for num_tokens, seconds in rehearsed_s.items():
            self._pace.observe(num_tokens, seconds)

    def of(self, num_tokens: int) -> float:
        """The limit of a step of so many tokens, in seconds."""
        if self._fixed_s is not None:
            return self._fixed_s
        return max(self._least_s, PATIENCE * (self._pace.expected_s(num_tokens) or 0.0))

    @contextmanager
    def over(self, step_id: int, num_tokens: int) -> Iterator[None]:
        """Around what one thread does for one step: launching it, or waiting for it."""
        thread = threading.get_ident()
        running = self._running[thread] = _Running(step_id, num_tokens, self.of(num_tokens))
        try:
            yield
        finally:
            del self._running[thread]
            self._pace.observe(num_tokens, running.seconds)

    def tick(self, elapsed_s: float) -> None:
        """Time passes."""
        for running in list(self._running.values()):
            running.seconds += min(elapsed_s, LONGEST_TICK_S)
            if running.seconds > running.limit_s:
                self._end(f"step {running.step_id} has not ended within {running.limit_s:g} s")

    def _watch(self) -> None:
        before_s = time.monotonic()
        while True:
            time.sleep(TICK_S)
            now_s = time.monotonic()
            self.tick(now_s - before_s)
            before_s = now_s
