"""Integer weights with a scale and an offset for each group of columns.

Every integer format of checkpoints is read into this one layout: GGUF's blocks, GPTQ, AWQ and
compressed-tensors. A kernel packs it further for its device.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

BITS = (4, 8)
ZERO_UNITS = {4: 8, 8: 1}  # of a step, in which zero points of weights for rounded rows are counted
MIDDLE = 128  # the zero point of 8 bits


@dataclass(frozen=True, slots=True)
class GroupedWeight:
    """A weight [N, K]: `scales * integers + offsets`, group by group along K."""

    integers: Tensor  # [N, K] uint8, each below 2**bits
    scales: Tensor  # [N, K / group] float32
    offsets: Tensor  # [N, K / group] float32
    bits: int  # 4 or 8
    rounds_rows: bool = False  # it is made for rows that are rounded to 8 bits, too

    def __post_init__(self) -> None:
        """Raises ValueError naming what does not fit."""
        if self.bits not in BITS:
            raise ValueError(f"bits: {self.bits} is none of {BITS}")
        if self.integers.dtype != torch.uint8 or self.integers.ndim != 2:
            found = f"{self.integers.dtype} {tuple(self.integers.shape)}"
            raise ValueError(f"integers: {found} is not uint8 [N, K]")
        num_outputs, num_inputs = self.integers.shape
        for name, values in (("scales", self.scales), ("offsets", self.offsets)):
            if values.dtype != torch.float32 or values.ndim != 2 or len(values) != num_outputs:
                found = f"{values.dtype} {tuple(values.shape)}"
                raise ValueError(f"{name}: {found} is not float32 [{num_outputs}, groups]")
        if self.scales.shape != self.offsets.shape or num_inputs % self.scales.shape[1]:
            found = f"{self.scales.shape[1]} and {self.offsets.shape[1]}"
            raise ValueError(f"scales, offsets: {found} groups do not divide {num_inputs} inputs")

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        num_outputs, num_inputs = self.integers.shape
        return num_outputs, num_inputs

    @property
    def group(self) -> int:
        """Columns that share a scale and an offset."""
        return self.integers.shape[1] // self.scales.shape[1]

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight [N, K]: computed in float32, then rounded once."""
        groups = self.integers.view(*self.scales.shape, self.group).float()
        values = groups * self.scales.unsqueeze(-1) + self.offsets.unsqueeze(-1)
        return values.view(self.shape).to(dtype)

    def zeros(self) -> Tensor | None:
        """Zero points [N, K / group], as `zero_points` says."""
        return zero_points(self.scales, self.offsets, self.bits)

    def regrouped(self, bits: int, group: int) -> "GroupedWeight":
        """The same values with more bits or in smaller groups. Raises ValueError for fewer."""
        if bits < self.bits or self.group % group:
            asked, have = f"{bits} bits by {group}", f"{self.bits} bits by {self.group}"
            raise ValueError(f"cannot express {have} in {asked}")
        repeats = self.group // group
        scales = self.scales.repeat_interleave(repeats, dim=1)
        offsets = self.offsets.repeat_interleave(repeats, dim=1)
        return replace(self, scales=scales, offsets=offsets, bits=bits)

    def to(self, device: torch.device) -> "GroupedWeight":
        """The same weight on a device."""
        scales, offsets = self.scales.to(device), self.offsets.to(device)
        return replace(self, integers=self.integers.to(device), scales=scales, offsets=offsets)

    def rows(self, begin: int, end: int) -> "GroupedWeight":
        """Outputs [begin, end) as views."""
        part = slice(begin, end)
        return self._of(self.integers[part], self.scales[part], self.offsets[part])

    def select(self, outputs: Tensor) -> "GroupedWeight":
        """Copies of the outputs with these indices [M], of any integer type."""
        integers, scales = self.integers[outputs], self.scales[outputs]
        return self._of(integers, scales, self.offsets[outputs])

    def columns(self, begin: int, end: int) -> "GroupedWeight":
        """Inputs [begin, end), cut at groups. Raises ValueError for another cut."""
        if begin % self.group or end % self.group:
            raise ValueError(f"columns {begin} to {end} cut groups of {self.group}")
        integers, groups = (
            self.integers[:, begin:end],
            slice(begin // self.group, end // self.group),
        )
        return self._of(integers, self.scales[:, groups], self.offsets[:, groups])

    @classmethod
    def concatenated(cls, parts: Sequence[Self]) -> "GroupedWeight":
        """Outputs of all parts, one part after the other, in the finest of their layouts."""
        bits, group = max(p.bits for p in parts), min(p.group for p in parts)
        alike = [part.regrouped(bits, group) for part in parts]
        return GroupedWeight(
            torch.cat([part.integers for part in alike]),
            torch.cat([part.scales for part in alike]),
            torch.cat([part.offsets for part in alike]),
            bits,
            all(part.rounds_rows for part in parts),
        )

    def _of(self, integers: Tensor, scales: Tensor, offsets: Tensor) -> "GroupedWeight":
        return replace(self, integers=integers, scales=scales, offsets=offsets)


def offsets_of(zeros: Tensor, scales: Tensor, bits: int) -> Tensor:
    """Offsets for zero points in ZERO_UNITS."""
    return zeros.mul(-1 / ZERO_UNITS[bits]).mul_(scales)


def zero_points(scales: Tensor, offsets: Tensor, bits: int) -> Tensor | None:
    """Zero points uint8, by bits in ZERO_UNITS; None if offsets are no such.

    Those of 8 bits are all MIDDLE, those of 4 bits below 16 steps.
    """
    units = ZERO_UNITS[bits]
    if bits == 8:
        zeros = torch.full_like(scales, MIDDLE)
    else:
        zeros = (offsets / scales).mul_(-units).round_().nan_to_num_(0)
        zeros.clamp_(0, (2**bits - 1) * units)
    return zeros.to(torch.uint8) if torch.equal(offsets_of(zeros, scales, bits), offsets) else None
