"""8-bit float weights (e4m3) with a scale for each output and group of columns.

Scales by tensor, by channel and by block are all read into this one layout.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels import fp8

FLOAT8 = torch.float8_e4m3fn
LARGEST = fp8.LARGEST[FLOAT8]


@dataclass(frozen=True, slots=True)
class ScaledWeight:
    """A weight [N, K]: `values * scales`, group by group along K; the last may be shorter."""

    values: Tensor  # [N, K] float8_e4m3fn
    scales: Tensor  # [N, ceil(K / group)] float32
    group: int  # columns that share a scale
    rounds_rows: bool = False  # the checkpoint is made for rows that are rounded to 8 bits, too

    def __post_init__(self) -> None:
        """Raises ValueError naming what does not fit."""
        if self.values.dtype != FLOAT8 or self.values.ndim != 2:
            found = f"{self.values.dtype} {tuple(self.values.shape)}"
            raise ValueError(f"values: {found} is not {FLOAT8} [N, K]")
        num_outputs, num_inputs = self.values.shape
        if self.group < 1:
            raise ValueError(f"group: {self.group} is not positive")
        wanted = (num_outputs, -(-num_inputs // self.group))
        if self.scales.dtype != torch.float32 or self.scales.shape != wanted:
            found = f"{self.scales.dtype} {tuple(self.scales.shape)}"
            raise ValueError(f"scales: {found} is not float32 {list(wanted)}")

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        num_outputs, num_inputs = self.values.shape
        return num_outputs, num_inputs

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight [N, K]: computed in float32, then rounded once."""
        if self.scales.shape[1] == 1:
            return (self.values.float() * self.scales).to(dtype)
        scales = self.scales.repeat_interleave(self.group, dim=1)[:, : self.shape[1]]
        return (self.values.float() * scales).to(dtype)

    def to(self, device: torch.device) -> "ScaledWeight":
        """The same weight on a device."""
        return replace(self, values=self.values.to(device), scales=self.scales.to(device))

    def rows(self, begin: int, end: int) -> "ScaledWeight":
        """Outputs [begin, end) as views."""
        return replace(self, values=self.values[begin:end], scales=self.scales[begin:end])

    def select(self, outputs: Tensor) -> "ScaledWeight":
        """The outputs of these indices, in their order."""
        # Not every operation knows the type, so its bytes are indexed.
        values = self.values.view(torch.uint8)[outputs].view(FLOAT8)
        return replace(self, values=values, scales=self.scales[outputs])

    def regrouped(self, group: int) -> "ScaledWeight":
        """The same values in smaller groups. Raises ValueError for others."""
        if group == self.group:
            return self
        if self.group < self.shape[1] and self.group % group:
            raise ValueError(f"cannot express groups of {self.group} in groups of {group}")
        starts = torch.arange(0, self.shape[1], group, device=self.scales.device)
        return replace(self, scales=self.scales[:, starts // self.group], group=group)

    @classmethod
    def concatenated(cls, parts: Sequence["ScaledWeight"]) -> "ScaledWeight":
        """Outputs of all parts, one part after the other, in the finest of their groups."""
        group = min(part.group for part in parts)
        alike = [part.regrouped(group) for part in parts]
        # Not every operation knows the type, so its bytes are joined.
        values = torch.cat([part.values.view(torch.uint8) for part in alike])
        scales = torch.cat([part.scales for part in alike])
        return cls(values.view(FLOAT8), scales, group, all(part.rounds_rows for part in parts))

    @classmethod
    def rounded(cls, weight: Tensor) -> "ScaledWeight":
        """The nearest, with one scale an output [N]; rows of zeros have the scale 1."""
        wide = weight.float()
        largest = wide.abs().amax(dim=1, keepdim=True)
        scales = torch.where(largest > 0, largest / LARGEST, torch.ones_like(largest))
        values = (wide / scales).clamp(-LARGEST, LARGEST).to(FLOAT8)
        return cls(values, scales, weight.shape[1], rounds_rows=True)
