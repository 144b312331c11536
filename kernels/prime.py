# mypy: disable-error-code="untyped-decorator"
"""Launches behind which the kernels of a CUDA graph should follow each other closely.

Measured on H200 (driver 580, CUDA 13.0), documented nowhere that we know of: between two kernels of
a graph lie either 0.1 or 0.5 us and, where the second may overlap the first, either -0.5 or none.
Of a decode step's 280 kernels that is 0.1 ms. Which of the two it is depends on what was launched
last outside of graphs. An ordinary kernel brings the pauses; a forward pass, whose kernels are
chained by programmatic dependent launch, takes them away; copies and replays change nothing, nor
does a single kernel with that option. So this is a short chain. That it is long enough has not been
measured: `bench/pauses.py` would show it (docs/performance.md).
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.pdl import has_pdl, launch_options

LENGTH = 3


def prime(scratch: torch.Tensor, length: int = LENGTH) -> None:
    """To be launched between other kernels and replays; counts in scratch [1]."""
    for _ in range(length):
        _prime_kernel[(1,)](scratch, PDL=has_pdl(scratch), num_warps=1, **launch_options(scratch))


@triton.jit
def _prime_kernel(scratch_ptr: tl.tensor, PDL: tl.constexpr) -> None:
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    tl.store(scratch_ptr, (tl.load(scratch_ptr) + 1) & 0xFF)
