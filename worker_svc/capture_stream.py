"""The one stream of a device that CUDA graphs are captured on.

Measured on H200 (driver 580, CUDA 13.0), documented nowhere that we know of: a graph captured on
the third or a later stream of a process may leave 0.35 us more between any two of its kernels
whenever the last launch outside of graphs was an ordinary one, which is 5 % of a decode step of 32
rows. One captured on the first stream never did (docs/performance.md).
"""

from functools import cache

import torch


def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The same stream at every call; made at the first."""
    return _stream_of(torch.cuda.current_device() if device.index is None else device.index)


@cache
def _stream_of(index: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(index)  # type: ignore[no-untyped-call]
