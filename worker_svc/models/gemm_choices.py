"""GEMM choices: the algorithm per shape, measured elsewhere, used by the fused layers.

Loads no Triton, since a worker without CUDA describes its choices, too.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from kernels.gemm.cublas_lt import ProductShape


@dataclass(frozen=True, slots=True)
class GemmChoice:
    """The algorithm for a shape, and its time."""

    algorithm: bytes | None  # None: torch's choice
    us: float
    torch_us: float


Choices = Mapping[ProductShape, GemmChoice]
