"""The tuned GEMM algorithm for each shape; `tuning` measures them, the fused layers use them.

Does not load Triton, since a worker without CUDA also describes its choices.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from kernels.gemm.cublas_lt import GemmShape


@dataclass(frozen=True, slots=True)
class GemmChoice:
    """The algorithm for a shape, with its time and that of torch's choice."""

    algorithm: bytes | None  # None: torch's choice
    us: float
    torch_us: float


Choices = Mapping[GemmShape, GemmChoice]
