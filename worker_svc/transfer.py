"""Host columns to the device: one copy for all of them, and nobody waits for it."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def upload(device: torch.device, *columns: NDArray[np.integer]) -> Sequence[Tensor]:
    """The columns as int64 tensors, in order.

    On CUDA they travel from pinned memory, in the order of the stream: what is launched later sees
    them, what still runs does not hold up the caller.
    """
    packed = torch.from_numpy(np.concatenate(columns, dtype=np.int64))
    if device.type == "cuda":
        packed = packed.pin_memory().to(device, non_blocking=True)
    return torch.split(packed, [len(column) for column in columns])
