"""Rows that a thread of the host writes while what reads them is launched already.

The stream waits for them on the device, so the thread that launches goes on with the next step.
"""

import logging
import threading
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker_svc.device.transfer import wait_for

log = logging.getLogger(__name__)

_GEQ = 0  # CU_STREAM_WAIT_VALUE_GEQ: as a difference of 32 bits, so a count may wrap around
_WORD = 1 << 32


class HostGate:
    """A count in memory that host and device share; a stream waits until it has come so far."""

    def __init__(self, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._count = torch.zeros(1, dtype=torch.int32, pin_memory=is_cuda)
        self._seen: NDArray[np.uint32] = self._count.numpy().view(np.uint32)
        self._changed = threading.Condition()
        self._num_open = 0
        self._driver = _driver_that_waits(device, self._count) if is_cuda else None

    @property
    def waits_on_device(self) -> bool:
        """True if the wait is the stream's; otherwise it is the thread's that launches."""
        return self._driver is not None

    def open(self, number: int) -> None:
        """Lets those through who wait for `number` or less; numbers ascend. From any thread."""
        with self._changed:
            self._num_open = number
            self._seen[0] = number % _WORD
            self._changed.notify_all()

    def wait(self, number: int) -> None:
        """Has what is launched on the current stream from here on wait for `number`."""
        if self._driver is not None:
            _wait(self._driver, self._count, number)
            return
        with self._changed:
            self._changed.wait_for(lambda: self._num_open >= number)


class LateRows:
    """Buffers in turn: the launching thread takes them, and another thread fills them, in order."""

    def __init__(
        self, num_rows: int, num_words: int, device: torch.device, length: int = 3
    ) -> None:
        is_cuda = device.type == "cuda"
        self.device = device
        self.gate = HostGate(device)
        shape = (num_rows, num_words)
        self._buffers = [
            torch.zeros(shape, dtype=torch.int32, pin_memory=is_cuda) for _ in range(length)
        ]
        # Of each buffer its last copy, which has an event of its own: another may be launched by
        # the time that this one is waited for.
        self._copied = [self._new_event() for _ in range(length)]
        self._num_taken = 0

    def take(self) -> "LateFill":
        """The next buffer, which is to be filled once all before it are."""
        self._num_taken += 1
        at = self._num_taken % len(self._buffers)
        before, self._copied[at] = self._copied[at], self._new_event()
        return LateFill(self, self._buffers[at], before, self._copied[at], self._num_taken)

    def _new_event(self) -> Any:
        return torch.cuda.Event() if self.device.type == "cuda" else None  # type: ignore[no-untyped-call]


class LateFill:
    """One filling of a buffer."""

    def __init__(
        self, late_rows: LateRows, buffer: Tensor, before: Any, copied: Any, number: int
    ) -> None:
        self._late_rows = late_rows
        self._buffer = buffer
        self._before = before
        self._copied = copied
        self._number = number

    @property
    def num_words(self) -> int:
        """Words of a row."""
        return self._buffer.shape[1]

    def begin(self) -> NDArray[np.int32]:
        """The rows [num_rows, num_words] to write, once the device has what was there before."""
        if self._before is not None:
            wait_for(self._before)
        rows: NDArray[np.int32] = self._buffer.numpy()
        return rows

    def end(self) -> None:
        """The rows are written. To be called whatever happened, or the device waits for ever."""
        self._late_rows.gate.open(self._number)

    def fetch(self, into: Tensor) -> None:
        """Copies the first rows to a tensor of the device [rows, num_words], once they are filled.

        Nothing here waits for it.
        """
        self._late_rows.gate.wait(self._number)
        into.copy_(self._buffer[: len(into)], non_blocking=True)
        if self._copied is not None:
            self._copied.record()


def _driver_that_waits(device: torch.device, count: Tensor) -> Any:
    """The CUDA driver, if its streams can wait for memory of the host; None if they cannot."""
    try:
        from cuda.bindings import driver  # noqa: PLC0415 - comes with torch's CUDA wheels

        _wait(driver, count, 0)
        torch.cuda.synchronize(device)
    except (ImportError, RuntimeError) as error:
        log.warning("launches wait for masks, since streams of this driver cannot: %s", error)
        return None
    return driver


def _wait(driver: Any, count: Tensor, number: int) -> None:
    """Raises RuntimeError if the driver refuses."""
    stream = torch.cuda.current_stream().cuda_stream
    (code,) = driver.cuStreamWaitValue32(stream, count.data_ptr(), number % _WORD, _GEQ)
    if code != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"cuStreamWaitValue32: {code}")
