"""The weights of all experts of a layer, as the kernels read them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels import fp8
from kernels.quantized.scaled import FLOAT8, ScaledWeight

MXFP4_GROUP = 32  # columns that share an exponent
_NOT_A_NUMBER = 0x7F  # of e4m3, with any sign
_EXPERTS_AT_ONCE = 16  # that are looked through
_LEAST_GROUP = 32  # columns that tensor cores multiply at once, with some to spare


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """A weight [N, K] of each expert: float numbers, or 8-bit floats and scales; and its bias.

    Or codes of MXFP4 and exponents: a byte has the codes of columns 32 i + j and 32 i + 16 + j, the
    first in its lower half.
    """

    values: torch.Tensor  # [E, N, K]; codes: uint8 [E, N, K / 2]
    scales: torch.Tensor | None = None  # [E, N, groups of columns] float32; exponents: uint8
    group: int | None = None  # columns that share scales; None: all
    bias: torch.Tensor | None = None  # [E, N]

    def __post_init__(self) -> None:
        """Raises ValueError or TypeError naming what does not fit."""
        if self.values.ndim != 3 or not self.values.is_contiguous():
            raise ValueError(f"weights must be contiguous [E, N, K], got {self.values.shape}")
        if (self.scales is None) == (self.values.dtype in (FLOAT8, torch.uint8)):
            raise TypeError(f"weights of {self.values.dtype}: {FLOAT8} and codes alone have scales")
        if self.bias is not None and self.bias.shape != self.values.shape[:2]:
            wanted = tuple(self.values.shape[:2])
            raise ValueError(f"bias must be {wanted}, got {tuple(self.bias.shape)}")
        if self.scales is not None:
            wanted = (*self.values.shape[:2], self.num_groups)
            dtype = torch.uint8 if self.is_mxfp4 else torch.float32
            if self.scales.shape != wanted or self.scales.dtype != dtype:
                name = str(dtype).removeprefix("torch.")
                raise ValueError(f"scales must be {name} {wanted}, got {tuple(self.scales.shape)}")

    @classmethod
    def stacked(cls, parts: Sequence[ScaledWeight]) -> "ExpertWeights | None":
        """The weights of all experts in 8 bits; None if groups are no tiles, or not all alike."""
        groups = {part.group for part in parts}
        group = groups.pop()
        is_whole = group >= parts[0].shape[1]
        if groups or (not is_whole and group & -group < _LEAST_GROUP):
            return None
        values = torch.stack([part.values.view(torch.uint8) for part in parts])
        scales = torch.stack([part.scales for part in parts])
        return cls(values.view(FLOAT8), scales, None if is_whole else group)

    @classmethod
    def of_codes(cls, codes: torch.Tensor, exponents: torch.Tensor) -> "ExpertWeights":
        """Weights in MXFP4."""
        return cls(codes, exponents, MXFP4_GROUP)

    @property
    def is_mxfp4(self) -> bool:
        """True for codes and exponents."""
        return self.values.dtype == torch.uint8

    @property
    def is_fp8(self) -> bool:
        """True for 8-bit floats and scales."""
        return self.values.dtype == FLOAT8

    @property
    def shape(self) -> tuple[int, int, int]:
        """(E, N, K)."""
        num_experts, num_outputs, width = self.values.shape
        return num_experts, num_outputs, 2 * width if self.is_mxfp4 else width

    @property
    def num_groups(self) -> int:
        """Groups of columns with scales of their own."""
        return 1 if self.group is None else -(-self.shape[2] // self.group)

    def block_k(self, most: int) -> int:
        """Columns of a tile, a power of two up to `most`: of one group, or in MXFP4 of any."""
        if self.is_mxfp4:
            return most
        return most if self.group is None else min(most, self.group & -self.group)

    def require_numbers(self) -> None:
        """Raises ValueError if 8-bit floats are not numbers, which kernels may take to be 480."""
        if not self.is_fp8:
            return
        # Some experts at a time: the temporaries are large, and launches many.
        parts = torch.split(self.values.view(torch.uint8).flatten(1), _EXPERTS_AT_ONCE)
        bad = torch.cat([(each & _NOT_A_NUMBER == _NOT_A_NUMBER).any(1) for each in parts])
        if bool(bad.any()):
            raise ValueError(f"expert {int(bad.nonzero()[0])} has weights that are not numbers")

    def check(self, x: torch.Tensor) -> None:
        """Raises ValueError or TypeError if rows x [M, K] cannot be multiplied."""
        k = self.shape[2]
        if x.shape[1] != k or x.stride(1) != 1:
            raise ValueError(f"x must be [T, {k}], its rows contiguous, got {tuple(x.shape)}")
        if self.scales is None and self.values.dtype != x.dtype:
            raise TypeError(f"x is {x.dtype}, weights are {self.values.dtype}")


def serves_float8(device: torch.device) -> bool:
    """True if kernels on the device convert 8-bit floats."""
    if device.type != "cuda":
        return True
    return torch.cuda.get_device_capability(device) >= fp8.MIN_CAPABILITY[FLOAT8]
