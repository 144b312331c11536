"""Times the phases of a step on the device that runs them, and what it idled between steps."""

import time
from dataclasses import dataclass
from itertools import pairwise

import torch

from worker_svc.step import StepTimings

NAP_S = 5e-6


class StepClock:
    """Marks between phases: events in the stream on CUDA, where launching is not running."""

    def __init__(self, device: torch.device, before: "StepClock | None" = None) -> None:
        self._is_cuda = device.type == "cuda"
        self._times: list[float] = []
        self._events: list[torch.cuda.Event] = []
        # The last mark alone of the step before: its clock would hold on to all older ones.
        self._times_before = before._times[-1:] if before else []
        self._events_before = before._events[-1:] if before else []

    def mark(self) -> None:
        """Ends one phase and starts the next."""
        if self._is_cuda:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._events.append(event)
        else:
            self._times.append(time.perf_counter())

    def wait(self) -> None:
        """Waits for the last mark; raises RuntimeError if the device failed on the way.

        Naps in place of the driver's own wait: as fast within what can be measured, and it leaves
        the core to the threads that prepare the next step.
        """
        if self._events:
            while not self._events[-1].query():  # type: ignore[no-untyped-call]
                time.sleep(NAP_S)

    def spans_us(self) -> list[int]:
        """Length of each phase; on CUDA the stream must have been waited for."""
        return self._between(self._events, self._times)

    def idle_us(self) -> int:
        """From the last mark of the step before to the first of this one; 0 if either has none."""
        events = self._events_before + self._events[:1]
        times = self._times_before + self._times[:1]
        return sum(self._between(events, times))

    def _between(self, events: list[torch.cuda.Event], times: list[float]) -> list[int]:
        if self._is_cuda:
            return [round(a.elapsed_time(b) * 1000) for a, b in pairwise(events)]
        return [round((b - a) * 1e6) for a, b in pairwise(times)]


@dataclass(frozen=True, slots=True)
class DecodeTime:
    """Steps that only decode, summed up: computed for so long, and idle ahead of them."""

    num_steps: int = 0
    busy_us: int = 0
    idle_us: int = 0

    def plus(self, step: StepTimings) -> "DecodeTime":
        """With one more."""
        return DecodeTime(
            self.num_steps + 1, self.busy_us + step.busy_us, self.idle_us + step.idle_us
        )
