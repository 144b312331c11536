"""How CUDA graphs are captured, and the one stream of a device that they are captured on.

Measured on H200 (driver 580, CUDA 13.0), documented nowhere that we know of: a graph captured on
the third or a later stream of a process may leave 0.35 us more between any two of its kernels
whenever the last launch outside of graphs was an ordinary one, which is 5 % of a decode step of 32
rows. One captured on the first stream never did (docs/performance.md).
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch


def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The same stream at every call; made at the first."""
    return _stream_of(torch.cuda.current_device() if device.index is None else device.index)


@contextmanager
def capturing(device: torch.device) -> Iterator[None]:
    """Captures of the block are on the one stream; afterwards all that it launched is done.

    Garbage is searched for before and not meanwhile: what older graphs, events and pinned memory
    do when they go would break a capture off.
    """
    torch.cuda.synchronize(device)
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    stream = capture_stream(device)
    try:
        with torch.cuda.stream(stream):
            yield
        stream.synchronize()
    finally:
        if was_enabled:
            gc.enable()


def captured(work: Callable[[], None], pool: Any = None) -> torch.cuda.CUDAGraph:
    """What work launches on the current stream; `pool` is whose memory it may take."""
    graph = torch.cuda.CUDAGraph()
    # Other threads may ask the device for something meanwhile, such as the debug service.
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        work()
    finally:
        graph.capture_end()
    return graph


@cache
def _stream_of(index: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(index)  # type: ignore[no-untyped-call]
