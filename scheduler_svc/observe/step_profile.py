"""Records what the loop of a worker group spends its time on, for one caller at a time."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from scheduler_svc.explain.trace import StepRecord

LOOP, STEPS = "loop", "steps"  # tracks
MAX_KEPT_STEPS = 4096  # of the loop; older ones are dropped
_MOST_INTERVALS = 8 * MAX_KEPT_STEPS


@dataclass(slots=True)
class LoopInterval:
    """Something that took time, in nanoseconds of the monotonic clock."""

    track: str
    name: str
    begin_ns: int
    duration_ns: int
    step_id: int
    num_tokens: int = 0  # of a whole step


@dataclass(frozen=True, slots=True)
class StepTimes:
    """When a step was sent and when its result was there, in nanoseconds."""

    sent_ns: int
    done_ns: int


class LoopProfile:
    """The intervals of one group's loop. Belongs to the event loop's thread."""

    def __init__(self) -> None:
        self.intervals: list[LoopInterval] = []
        self.steps: dict[int, StepTimes] = {}
        self._last_done_ns = 0

    @contextmanager
    def timed(self, name: str, step_id: int = 0) -> Iterator[LoopInterval]:
        """Adds the time of the block; its step may be named inside."""
        interval = LoopInterval(LOOP, name, time.monotonic_ns(), 0, step_id)
        yield interval
        interval.duration_ns = time.monotonic_ns() - interval.begin_ns
        if interval.step_id:  # else there was nothing to plan
            self._add(interval)

    def step_done(self, record: StepRecord, received_ns: int) -> None:
        """Adds a step whose result came, from when nothing stood before it any more."""
        sent_ns = round(record.sent_s * 1e9)
        begin_ns = max(sent_ns, self._last_done_ns)
        self.steps[record.plan.step_id] = StepTimes(sent_ns, received_ns)
        self._last_done_ns = received_ns
        if len(self.steps) > MAX_KEPT_STEPS:
            del self.steps[next(iter(self.steps))]
        num_tokens = record.plan.num_tokens
        took_ns = max(received_ns - begin_ns, 0)
        self._add(LoopInterval(STEPS, "step", begin_ns, took_ns, record.plan.step_id, num_tokens))

    def _add(self, interval: LoopInterval) -> None:
        if len(self.intervals) >= _MOST_INTERVALS:
            del self.intervals[: _MOST_INTERVALS // 2]
        self.intervals.append(interval)
