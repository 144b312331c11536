"""Integer weights with a scale and an offset for each group of columns.

Every integer format of checkpoints is read into this one layout: GGUF's blocks, GPTQ, AWQ and
compressed-tensors. A kernel packs it further for its device.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

BITS = (4, 8)


@dataclass(frozen=True, slots=True)
class GroupedWeight:
    """A weight [N, K]: `scales * integers + offsets`, group by group along K."""

    integers: Tensor  # [N, K] uint8, each below 2**bits
    scales: Tensor  # [N, K / group] float32
    offsets: Tensor  # [N, K / group] float32
    bits: int  # 4 or 8

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

    def regrouped(self, bits: int, group: int) -> "GroupedWeight":
        """The same values with more bits or in smaller groups. Raises ValueError for fewer."""
        if bits < self.bits or self.group % group:
            asked, have = f"{bits} bits by {group}", f"{self.bits} bits by {self.group}"
            raise ValueError(f"cannot express {have} in {asked}")
        repeats = self.group // group
        scales = self.scales.repeat_interleave(repeats, dim=1)
        offsets = self.offsets.repeat_interleave(repeats, dim=1)
        return GroupedWeight(self.integers, scales, offsets, bits)

    def to(self, device: torch.device) -> "GroupedWeight":
        """The same weight on a device."""
        scales, offsets = self.scales.to(device), self.offsets.to(device)
        return GroupedWeight(self.integers.to(device), scales, offsets, self.bits)

    def rows(self, begin: int, end: int) -> "GroupedWeight":
        """Outputs [begin, end) as views."""
        part = slice(begin, end)
        return GroupedWeight(self.integers[part], self.scales[part], self.offsets[part], self.bits)

    def select(self, outputs: Tensor) -> "GroupedWeight":
        """Copies of the outputs with these indices [M], of any integer type."""
        integers, scales = self.integers[outputs], self.scales[outputs]
        return GroupedWeight(integers, scales, self.offsets[outputs], self.bits)

    def columns(self, begin: int, end: int) -> "GroupedWeight":
        """Inputs [begin, end), cut at groups. Raises ValueError for another cut."""
        if begin % self.group or end % self.group:
            raise ValueError(f"columns {begin} to {end} cut groups of {self.group}")
        integers, groups = (
            self.integers[:, begin:end],
            slice(begin // self.group, end // self.group),
        )
        return GroupedWeight(integers, self.scales[:, groups], self.offsets[:, groups], self.bits)

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
        )
