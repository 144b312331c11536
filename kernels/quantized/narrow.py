"""Weights in 4 or 8 bits as the kernels for CUDA read them, and the numbers they stand for.

    data uint8 [N, K / 2 or K], scales float32 [N, G], offsets float32 [N, G] or none

An integer q stands for `q * scale + offset`, an 8-bit float for `value * scale`. A byte of 4-bit
integers has columns j (low) and j + group / 2 (high) of a group, so that both halves of a tile of
bytes are columns that lie together.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.quantized.grouped import GroupedWeight
from kernels.quantized.scaled import ScaledWeight

MAX_GROUP = 128
MIN_COLUMNS = 16  # of a tile that tensor cores multiply


@dataclass(frozen=True, slots=True)
class NarrowWeight:
    """A weight [N, K]; `group` is a power of two, or K for one group."""

    data: Tensor
    scales: Tensor
    offsets: Tensor | None  # None: 8-bit floats
    bits: int
    group: int
    rounds_rows: bool = False  # as of `ScaledWeight`

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        num_outputs, num_bytes = self.data.shape
        return num_outputs, num_bytes * 8 // self.bits

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        offsets = 0 if self.offsets is None else self.offsets.nbytes
        return self.data.nbytes + self.scales.nbytes + offsets

    @classmethod
    def of(cls, weight: GroupedWeight | ScaledWeight) -> "NarrowWeight | None":
        """The same numbers; None if the groups are not made of tiles."""
        num_inputs = weight.shape[1]
        tile = _tile(math.gcd(weight.group, num_inputs))
        if isinstance(weight, ScaledWeight) and weight.scales.shape[1] == 1:
            values, scales = weight.values.view(torch.uint8), weight.scales
            return cls(values, scales, None, 8, num_inputs, weight.rounds_rows)
        if tile < MIN_COLUMNS:
            return None
        if isinstance(weight, ScaledWeight):
            fine = weight.regrouped(tile)
            return cls(fine.values.view(torch.uint8), fine.scales.contiguous(), None, 8, tile)
        grouped = weight.regrouped(weight.bits, tile)
        bits = 4 if weight.bits == 4 and tile >= 2 * MIN_COLUMNS else 8
        data = grouped.integers if bits == 8 else _halves(grouped.integers, tile)
        return cls(data.contiguous(), grouped.scales, grouped.offsets, bits, tile)


def _tile(group: int) -> int:
    """The largest power of two that divides a group, up to a limit."""
    return min(group & -group, MAX_GROUP)


def _halves(integers: Tensor, group: int) -> Tensor:
    """uint8 [N, K] below 16 -> [N, K / 2]: the second half of each group in the upper bits."""
    low, high = integers.view(len(integers), -1, 2, group // 2).unbind(2)
    return (low | (high << 4)).flatten(1)
