"""Times the phases of a step on its device, and the idle time between steps."""

import time
from dataclasses import dataclass
from itertools import pairwise

import torch

from worker_svc.device.transfer import wait_for
from worker_svc.protocol.step import StepTimings


class StepClock:
    """Time stamps between phases; CUDA events on a GPU, since launches are asynchronous."""

    def __init__(self, device: torch.device, before: "StepClock | None" = None) -> None:
        self._is_cuda = device.type == "cuda"
        # Asked for once: each event would ask again.
        self._stream = torch.cuda.current_stream(device) if self._is_cuda else None
        self._times: list[float] = []
        self._events: list[torch.cuda.Event] = []
        # Keeps the last event of the previous step only; its clock would keep all older clocks
        # alive.
        self._times_before = before._times[-1:] if before else []
        self._events_before = before._events[-1:] if before else []

    def begin(self) -> None:
        """Starts the first phase, unless it has begun."""
        if not (self._events or self._times):
            self.mark()

    def mark(self) -> None:
        """Ends one phase and starts the next."""
        if self._is_cuda:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record(self._stream)
            self._events.append(event)
        else:
            self._times.append(time.perf_counter())

    def wait(self) -> None:
        """Waits for the last mark. Raises RuntimeError if the device failed before it."""
        if self._events:
            wait_for(self._events[-1])

    def block(self) -> None:
        """The same wait for a thread that may spin; it holds no lock."""
        if self._events:
            self._events[-1].synchronize()

    def spans_us(self) -> list[int]:
        """Microseconds of each phase; on CUDA call `wait` first."""
        return self._between(self._events, self._times)

    def idle_us(self) -> int:
        """Microseconds from the previous step's last mark to this step's first; 0 if missing."""
        events = self._events_before + self._events[:1]
        times = self._times_before + self._times[:1]
        return sum(self._between(events, times))

    def _between(self, events: list[torch.cuda.Event], times: list[float]) -> list[int]:
        if self._is_cuda:
            return [round(a.elapsed_time(b) * 1000) for a, b in pairwise(events)]
        return [round((b - a) * 1e6) for a, b in pairwise(times)]


@dataclass(frozen=True, slots=True)
class DecodeTime:
    """Totals of decode-only steps: busy time, and idle time before them, in microseconds."""

    num_steps: int = 0
    busy_us: int = 0
    idle_us: int = 0

    def plus(self, step: StepTimings) -> "DecodeTime":
        """Returns the totals with one more step."""
        return DecodeTime(
            self.num_steps + 1, self.busy_us + step.busy_us, self.idle_us + step.idle_us
        )
