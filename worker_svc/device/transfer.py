"""Copies columns to the device and tokens back, without blocking the launching thread."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def upload(device: torch.device, *columns: NDArray[np.integer]) -> Sequence[Tensor]:
    """The columns as int64 tensors, in order.

    On CUDA they are copied from pinned memory in the order of the stream: later launches see them,
    and running ones do not block the caller.
    """
    packed = upload_array(device, np.concatenate(columns, dtype=np.int64))
    return torch.split(packed, [len(column) for column in columns])


def upload_array(device: torch.device, array: NDArray[np.integer]) -> Tensor:
    """One array with its type, copied in the same way."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        tensor = tensor.pin_memory().to(device, non_blocking=True)
    return tensor


def download(values: Tensor) -> Callable[[], NDArray[np.int64]]:
    """Starts a copy of integers to the host; the returned call waits for it, in any thread.

    The values are those after all launches before this one, whatever is launched later.
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
