"""Times the phases of a step on the device that runs them."""

import time
from itertools import pairwise

import torch

NAP_S = 5e-6


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
        if self._is_cuda:
            return [int(a.elapsed_time(b) * 1000) for a, b in pairwise(self._events)]
        return [int((b - a) * 1e6) for a, b in pairwise(self._times)]
