"""Ends the process if a step takes too long, since a hanging kernel cannot be interrupted.

Heartbeats go on while a device hangs, and libraries have no timeout for collectives inside CUDA
graphs. The scheduler stops using such a worker; ending it makes room for a new one. The default
limit is a multiple of the step times measured on this machine, so that a slow machine is not
mistaken for a hanging one.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf

from wire.step_pace import StepPace
from worker_svc.process.exit_codes import ExitCode, end_process

TICK_S = 0.25
# Time is counted in ticks of at most this length, since this process may be suspended itself.
LONGEST_TICK_S = 2 * TICK_S
# Default limit: PATIENCE times the expected time of the step, at least LEAST_S of the device. A
# slow step on a CPU is more likely starved of cores or memory than hanging.
LEAST_S = {"cpu": 300.0, "cuda": 60.0}
PATIENCE = 30.0


@dataclass(slots=True)
class _Running:
    step_id: int
    num_tokens: int
    limit_s: float
    seconds: float = 0.0


def _end(reason: str) -> None:
    end_process(ExitCode.STEP_OVERDUE, reason, with_stacks=True)


class StepLimit:
    """Running time of the step in each thread, and the limit at which the process ends.

    limit_s holds for all steps; 0: no limit; None: a multiple of this machine's step times.
    """

    def __init__(self, limit_s: float | None = 0.0, end: Callable[[str], None] = _end) -> None:
        self._fixed_s = inf if limit_s == 0 else limit_s
        self._end = end
        self._least_s = max(LEAST_S.values())  # until the device is known
        self._pace = StepPace()
        self._running: dict[int, _Running] = {}  # by thread id

    def start(self) -> None:
        """Starts the thread that checks the limits."""
        if self._fixed_s != inf:
            threading.Thread(target=self._watch, name="step-limit", daemon=True).start()

    def follow(self, device: str, rehearsed_s: Mapping[int, float]) -> None:
        """Sets the device (cpu or cuda) and the measured seconds of rehearsed steps by their number
        of tokens."""
        self._least_s, self._pace = LEAST_S[device], StepPace()
        for num_tokens, seconds in rehearsed_s.items():
            self._pace.observe(num_tokens, seconds)

    def of(self, num_tokens: int) -> float:
        """The limit of a step with this number of tokens, in seconds."""
        if self._fixed_s is not None:
            return self._fixed_s
        return max(self._least_s, PATIENCE * (self._pace.expected_s(num_tokens) or 0.0))

    @contextmanager
    def over(self, step_id: int, num_tokens: int) -> Iterator[None]:
        """Context in which one thread works on a step: launches it, or waits for its result."""
        thread = threading.get_ident()
        running = self._running[thread] = _Running(step_id, num_tokens, self.of(num_tokens))
        try:
            yield
        finally:
            del self._running[thread]
            self._pace.observe(num_tokens, running.seconds)

    def tick(self, elapsed_s: float) -> None:
        """Adds the elapsed time to all running steps; ends the process if one is over its limit."""
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
