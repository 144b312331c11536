"""Times candidates on a CUDA device, and says which of them is taken.

Both autotuners use it: attention backends and GEMM algorithms.
"""

from collections.abc import Callable, Sequence

import torch

ROUNDS = 3


def least_us(candidates: Sequence[Callable[[], object]], waits: bool) -> list[float]:
    """The shortest time of each candidate in microseconds, after a warm-up round.

    Rounds are interleaved, so that a change of the clock affects all. `waits`: the host waits for
    each before it launches the next; else for all at the end.
    """
    rounds = [[_timed(each, waits) for each in candidates] for _ in range(1 + ROUNDS)]
    if not waits:
        torch.cuda.current_stream().synchronize()
    warm = [[1e3 * float(start.elapsed_time(end)) for start, end in one] for one in rounds[1:]]
    return [min(found) for found in zip(*warm, strict=True)]


def vote(times_us: Sequence[float], worthwhile: float) -> int:
    """The index of the choice: a later one is taken if it is faster by more than `worthwhile`.

    Smaller differences are noise, and a restart should repeat the choice.
    """
    best = 0
    for index, us in enumerate(times_us):
        if us < times_us[best] * (1 - worthwhile):
            best = index
    return best


def _timed(work: Callable[[], object], waits: bool) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    start, end = _event(), _event()
    start.record()
    work()
    end.record()
    if waits:
        end.synchronize()
    return start, end


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
