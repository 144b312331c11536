"""Which algorithm multiplies a shape: measured elsewhere, used by the fused layers.

Loads no Triton, since a worker without CUDA describes its choices, too.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from kernels.cublas_lt import ProductShape


@dataclass(frozen=True, slots=True)
class GemmChoice:
    """The algorithm for a shape, and how long it takes."""

    algorithm: bytes | None  # None: the one that torch takes
    us: float
    torch_us: float


Choices = Mapping[ProductShape, GemmChoice]
