"""Times the phases of a step on the device that runs them."""

import time
from itertools import pairwise

import torch


class StepClock:
    """Marks between phases: events in the stream on CUDA, where launching is not running."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._times: list[float] = []
        self._events: list[torch.cuda.Event] = []

    def mark(self) -> None:
        """Ends one phase and starts the next."""
        if self._is_cuda:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._events.append(event)
        else:
            self._times.append(time.perf_counter())

    def spans_us(self) -> list[int]:
        """Length of each phase; on CUDA the stream must have been waited for."""
        if self._is_cuda:
            return [int(a.elapsed_time(b) * 1000) for a, b in pairwise(self._events)]
        return [int((b - a) * 1e6) for a, b in pairwise(self._times)]
