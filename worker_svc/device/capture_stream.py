"""Captures all CUDA graphs of a device on one stream.

Measured on H200 (driver 580, CUDA 13.0), and not documented as far as we know: in a graph captured
on the third or a later stream of a process, the gap between two kernels may be 0.35 us longer
whenever the last launch outside of graphs was an ordinary kernel. This is 5 % of a decode step of
32 rows. Graphs captured on the first stream never had it (docs/performance.md).
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch


def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream for captures on this device, created at the first call."""
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
    """Captures the launches of `work` in a graph; `pool` is the memory pool to use."""
    graph = torch.cuda.CUDAGraph()
    # Other threads, such as the debug service, may use the device during the capture.
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        work()
    finally:
        graph.capture_end()
    return graph


@cache
def _stream_of(index: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(index)  # type: ignore[no-untyped-call]
