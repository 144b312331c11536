"""Times the library's GEMM algorithms on this device, with the model's weights.

Timed in CUDA graphs, as they run later. The calls of a graph use a different layer's weight each,
as in a step, so that no weight is still in a cache from the previous call.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.linalg import vector_norm

from kernels.gemm.cublas_lt import CublasError, CublasLt, GemmKind, GemmShape
from worker_svc.device.capture_stream import capture_stream, captured
from worker_svc.tuning.gemm_choice import Timing
from worker_svc.tuning.stopwatch import least_us

log = logging.getLogger(__name__)

# Larger than any cache of the device.
COLD_BYTES = 1 << 28
MAX_CALLS = 8
# From this number of rows on, one call takes long enough to be timed alone.
MANY_ROWS = 1024
# Sums in another order differ in the last bit of bfloat16, a relative error of 2⁻⁸.
MAX_ERROR = 0.02

Multiply = Callable[[Tensor], object]  # a GEMM with a weight [N, K]


class GemmTimer:
    """Times every algorithm of the library, and torch's call."""

    def __init__(
        self,
        library: CublasLt,
        weights: Mapping[GemmKind, Sequence[Tensor]],
        device: torch.device,
    ) -> None:
        self._library = library
        self._weights = weights
        self._device = device

    @torch.inference_mode()
    def measure(self, shape: GemmShape) -> list[Timing]:
        """Timings of torch's call, then of each algorithm that works and matches its result."""
        kind = shape.kind
        x = torch.randn((shape.rows, kind.k), dtype=kind.dtype, device=self._device)
        out = torch.zeros((shape.rows, kind.n), dtype=kind.dtype, device=self._device)
        weights = in_turn(self._weights[kind], shape.rows)
        expected = F.linear(x, weights[0])
        stream = capture_stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            rival_of = partial(_Rival.of, weights=weights, out=out, expected=expected)
            rivals = [rival_of(None, partial(_by_torch, x, out, kind.adds))]
            for algorithm in self._library.candidates(shape):
                try:
                    gemm = partial(self._library.gemm(shape, algorithm), x, out=out)
                    rivals.append(rival_of(algorithm, gemm))
                except CublasError as error:
                    log.info("an algorithm for %s is left out: %s", shape, error)
            times_us = least_us([rival.graph.replay for rival in rivals], waits=False)
            differences = torch.stack([rival.difference for rival in rivals])
            errors = (differences / vector_norm(expected, inf)).tolist()
        timings = [
            Timing(rival.algorithm, us / len(weights))
            for rival, us in zip(rivals, times_us, strict=True)
        ]
        return without_wrong(shape, timings, errors)


@dataclass(frozen=True, slots=True)
class _Rival:
    """A captured algorithm to time; None is torch's call."""

    algorithm: bytes | None
    graph: torch.cuda.CUDAGraph
    difference: Tensor  # largest difference from torch's result

    @classmethod
    def of(
        cls,
        algorithm: bytes | None,
        multiply: Multiply,
        weights: Sequence[Tensor],
        out: Tensor,
        expected: Tensor,
    ) -> "_Rival":
        """Captures the calls on the current stream."""
        out.zero_()
        multiply(weights[0])  # also loads the kernel, not possible in a capture
        difference = vector_norm(out.sub_(expected), inf)

        def calls() -> None:
            for weight in weights:
                multiply(weight)

        return cls(algorithm, captured(calls), difference)


def in_turn(weights: Sequence[Tensor], num_rows: int) -> list[Tensor]:
    """The weight of each call in one graph: more bytes than caches hold, or one weight."""
    if num_rows >= MANY_ROWS:
        return [weights[0]]
    num_calls = min(MAX_CALLS, max(2, -(-COLD_BYTES // weights[0].nbytes)))
    return [weights[index % len(weights)] for index in range(num_calls)]


def without_wrong(
    shape: GemmShape, timings: Sequence[Timing], errors: Sequence[float]
) -> list[Timing]:
    """Keeps torch's timing and algorithms that match its result; logs the others."""
    found = []
    for timing, error in zip(timings, errors, strict=True):
        if timing.algorithm is None or error <= MAX_ERROR:
            found.append(timing)
        else:  # wrong, or NaN
            log.warning("an algorithm for %s is left out: it is %.2g off torch's", shape, error)
    return found


def _by_torch(x: Tensor, out: Tensor, adds: bool, weight: Tensor) -> None:
    if adds:
        out.addmm_(x, weight.t())
    else:
        torch.mm(x, weight.t(), out=out)
