"""Copies columns to the device and tokens to the host without blocking the launching thread."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

NAP_S = 5e-6


def upload(device: torch.device, *columns: NDArray[np.integer]) -> Sequence[Tensor]:
    """Copies the columns to the device as int64 tensors, in order.

    On CUDA the copy is from pinned memory and ordered by the stream: later launches see it, and
    running ones do not block the caller.
    """
    packed = upload_array(device, np.concatenate(columns, dtype=np.int64))
    return torch.split(packed, [len(column) for column in columns])


def upload_array(device: torch.device, array: NDArray[Any]) -> Tensor:
    """Copies one array to the device, with its dtype, in the same way."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        tensor = tensor.pin_memory().to(device, non_blocking=True)
    return tensor


class PinnedRing:
    """A ring of pinned buffers for copies to a device.

    A buffer is written again only after its last copy is done: the copies of half of the ring are
    waited for together, before the first of it is written again.
    """

    def __init__(self, num_words: int, device: torch.device, length: int = 8) -> None:
        self._is_cuda = device.type == "cuda"
        self._buffers = [
            torch.zeros(num_words, dtype=torch.int32, pin_memory=self._is_cuda)
            for _ in range(length)
        ]
        self._views = [buffer.numpy() for buffer in self._buffers]
        self._half = length // 2
        self._copied = [
            torch.cuda.Event()  # type: ignore[no-untyped-call]
            for _ in range(2 if self._is_cuda else 0)
        ]
        self._next = 0

    def send(self, words: NDArray[np.int32], into: Tensor) -> None:
        """Copies the int32 words [N] to `into[:N]`, in stream order."""
        turn, self._next = self._next, (self._next + 1) % len(self._buffers)
        half, place = divmod(turn, self._half)
        if self._is_cuda and place == 0:
            self._copied[half].synchronize()
        length = len(words)
        self._views[turn][:length] = words
        into[:length].copy_(self._buffers[turn][:length], non_blocking=True)
        if self._is_cuda and place == self._half - 1:
            self._copied[half].record()


def wait_for(event: torch.cuda.Event) -> None:
    """Waits for an event. Raises RuntimeError if the device failed before it.

    It sleeps between queries instead of using the driver's wait: equally fast within measurement
    error, and the core is free for the threads that prepare the next step.
    """
    while not event.query():  # type: ignore[no-untyped-call]
        time.sleep(NAP_S)


def fetched(values: Tensor) -> Tensor:
    """Starts a copy to the host, valid after the launches so far; does not wait for them."""
    if values.device.type != "cuda":
        return values
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return host.copy_(values, non_blocking=True)


def download(values: Tensor) -> Callable[[], NDArray[np.int64]]:
    """Starts a copy of integers to the host; the returned function waits for it, in any thread.

    The copy has the values after all launches so far; later launches do not affect it.
    """
    if values.device.type != "cuda":
        fetched = values.clone().numpy().astype(np.int64)
        return lambda: fetched
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    host.copy_(values, non_blocking=True)
    arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
    arrived.record()

    def fetch() -> NDArray[np.int64]:
        arrived.synchronize()
        return host.numpy().astype(np.int64)

    return fetch
