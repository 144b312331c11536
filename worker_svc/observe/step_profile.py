"""Records where the time of the next steps goes, for one caller at a time.

Times are nanoseconds of the performance counter. While nothing is recorded, there is no recorder,
and a step asks for nothing but that.
"""

import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

from worker_svc.protocol.step import StepTimings


@dataclass(frozen=True, slots=True)
class StepInterval:
    """Something that took time, on a track: intervals of a track nest or are apart."""

    track: str
    name: str
    begin_ns: int
    duration_ns: int
    step_id: int = 0
    num_tokens: int = 0  # of a whole step
    num_decode_rows: int = 0


@dataclass(frozen=True, slots=True)
class ComputedRows:
    """The work of a step."""

    num_tokens: int
    num_decode_rows: int


class StepProfile:
    """The steps of one recording. Written by the threads that compute and answer."""

    def __init__(self, num_steps: int, *, is_asynchronous: bool) -> None:
        self._num_steps = num_steps
        self._is_asynchronous = is_asynchronous
        self._found: deque[StepInterval] = deque()
        self._lock = threading.Lock()
        self._last_end_ns = 0  # of the device's track
        self.num_recorded = 0
        self.is_full = threading.Event()

    def computed(
        self, step_id: int, rows: ComputedRows, timings: StepTimings, started_s: float
    ) -> None:
        """Adds a step that has computed, which was launched at `started_s`."""
        now_ns, begin_ns = time.perf_counter_ns(), round(started_s * 1e9)
        launch_ns = timings.prepare_us * 1000
        with self._lock:
            if self.num_recorded >= self._num_steps:
                return
            track = "compute"
            launch = StepInterval(track, "launch", begin_ns, launch_ns, step_id)
            phases_ns = begin_ns + launch_ns
            if self._is_asynchronous:  # the device computes on while the next step is launched
                launch, track = replace(launch, track="launch"), "device"
                # Its own clock says how long, and not when: at the latest until now.
                begin_ns = phases_ns = max(now_ns - timings.busy_us * 1000, self._last_end_ns)
            took_ns = now_ns - begin_ns
            counts = (rows.num_tokens, rows.num_decode_rows)
            self._found.append(StepInterval(track, "step", begin_ns, took_ns, step_id, *counts))
            self._found.append(launch)
            self._found.extend(_phases(track, phases_ns, now_ns, step_id, timings))
            self._last_end_ns = now_ns
            self.num_recorded += 1

    def sent(self, step_id: int, begin_ns: int, end_ns: int) -> None:
        """Adds the time in which a step's answer was encoded and given to its stream."""
        with self._lock:
            self._found.append(
                StepInterval("answers", "send", begin_ns, end_ns - begin_ns, step_id)
            )
            if self.num_recorded >= self._num_steps:
                self.is_full.set()

    def take(self) -> list[StepInterval]:
        """Removes and returns what was added since the last call."""
        with self._lock:
            found = list(self._found)
            self._found.clear()
        return found


def _phases(
    track: str, begin_ns: int, end_ns: int, step_id: int, timings: StepTimings
) -> Iterator[StepInterval]:
    """One after the other within the step, whatever the two clocks make of the last one."""
    for name, took_us in (
        ("compute", timings.forward_us),
        ("sample", timings.sample_us),
        ("copy", timings.copy_us),
    ):
        duration_ns = max(min(took_us * 1000, end_ns - begin_ns), 0)
        yield StepInterval(track, name, begin_ns, duration_ns, step_id)
        begin_ns += duration_ns
