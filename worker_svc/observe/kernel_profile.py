"""Records the kernels that a CUDA device runs, by torch's profiler."""

import time
from types import TracebackType
from typing import Any, Self

import torch
from torch.profiler import ProfilerActivity

from worker_svc.observe.step_profile import StepInterval

MAX_KERNELS = 50_000
MAX_NAME = 120


class KernelProfile:
    """Kernels between begin and end, on the performance counter's clock."""

    def __init__(self, device: str = "CUDA") -> None:
        activity = ProfilerActivity.CUDA if device == "CUDA" else ProfilerActivity.CPU
        self._device = device
        self._profiler: Any = torch.profiler.profile(activities=[activity])
        self._begun_ns = 0
        self.num_left_out = 0

    def __enter__(self) -> Self:
        self._profiler.start()
        self._begun_ns = time.perf_counter_ns()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._profiler.stop()

    def intervals(self) -> list[StepInterval]:
        """The kernels, once it has ended; those after the first 50,000 are left out."""
        kernels = [e for e in self._profiler.events() if e.device_type.name == self._device]
        self.num_left_out = max(len(kernels) - MAX_KERNELS, 0)
        found = []
        ends_ns: dict[str, int] = {}
        for kernel in sorted(kernels, key=lambda e: e.time_range.start)[:MAX_KERNELS]:
            track = f"kernels, stream {kernel.thread}"
            begin_ns = self._begun_ns + round(kernel.time_range.start * 1000)
            end_ns = self._begun_ns + round(kernel.time_range.end * 1000)
            begin_ns = max(begin_ns, ends_ns.get(track, 0))  # rounded apart, they must not overlap
            if end_ns > begin_ns:
                ends_ns[track] = end_ns
                found.append(
                    StepInterval(track, kernel.name[:MAX_NAME], begin_ns, end_ns - begin_ns)
                )
        return found
