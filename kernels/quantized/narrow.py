"""Weights in 4 or 8 bits as the kernels for CUDA read them, and the numbers they stand for.

    data uint8 [N, K / 2 or K], scales float32 [N, G], offsets float32 [N, G] or none

An integer q stands for `q * scale + offset`, an 8-bit float for `value * scale`. A byte of 4-bit
integers has columns j (low) and j + group / 2 (high) of a group, so that both halves of a tile of
bytes are columns that lie together.

Kernels in CUDA C (`kernels.cluster.narrow_rows`) read integers in another order, by lanes of a
warp: of 64 bytes, lane t of four has bytes 16 t to 16 t + 15, and word i of each has columns of
quarter i, which is one group's, down to groups of a quarter. A word of 4-bit integers has columns
8 t to 8 t + 7 of the quarter, in bytes with (low, high) 0 and 2, 4 and 6, 1 and 3, 5 and 7: what is
4 or 16 bits apart is widened at once. One of 8-bit integers has columns 4 t to 4 t + 3, in bytes 0,
2, 1, 3. By lanes, scales and zero points are pairs of float16 numbers [N, G, 2] wherever these are
exact: an integer then stands for `(q - zero) * scale`.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels.quantized.grouped import ZERO_UNITS, GroupedWeight, zero_points
from kernels.quantized.scaled import ScaledWeight

MAX_GROUP = 128
MIN_COLUMNS = 16  # of a tile that tensor cores multiply
# Of a segment by lanes: words of a lane, lanes, bytes of a word; and all its bytes.
WORDS, _LANES, _WORD_BYTES = 4, 4, 4
SEGMENT = _LANES * WORDS * _WORD_BYTES


@dataclass(frozen=True, slots=True)
class NarrowWeight:
    """A weight [N, K]; `group` is a power of two, or K for one group."""

    data: Tensor
    scales: Tensor
    offsets: Tensor | None  # None: of 8-bit floats, and where zero points are with the scales
    bits: int
    group: int
    rounds_rows: bool = False  # as of `ScaledWeight`
    is_by_lanes: bool = False  # integers in the order of lanes

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        num_outputs, num_bytes = self.data.shape
        return num_outputs, num_bytes * 8 // self.bits

    @property
    def is_paired(self) -> bool:
        """True if scales are float16, with zero points."""
        return self.scales.dtype == torch.float16

    @property
    def is_float(self) -> bool:
        """True if it has 8-bit floats."""
        return self.offsets is None and not self.is_paired

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

    def by_lanes(self) -> "NarrowWeight":
        """The same numbers in the order of lanes. Raises ValueError if they are no segments."""
        if self.offsets is None:
            return self
        if self.data.shape[1] % SEGMENT:
            raise ValueError(f"{self.data.shape[1]} bytes of an output are no segments")
        integers = self.data if self.bits == 8 else _integers(self.data, self.group)
        data = _in_lanes(integers, self.bits).contiguous()
        pairs = _pairs(self.scales, self.offsets, self.bits)
        scales, offsets = (self.scales, self.offsets) if pairs is None else (pairs, None)
        return replace(self, data=data, scales=scales, offsets=offsets, is_by_lanes=True)


def _tile(group: int) -> int:
    """The largest power of two that divides a group, up to a limit."""
    return min(group & -group, MAX_GROUP)


def _halves(integers: Tensor, group: int) -> Tensor:
    """uint8 [N, K] below 16 -> [N, K / 2]: the second half of each group in the upper bits."""
    low, high = integers.view(len(integers), -1, 2, group // 2).unbind(2)
    return (low | (high << 4)).flatten(1)


def _integers(data: Tensor, group: int) -> Tensor:
    """The inverse of `_halves`."""
    halves = data.view(len(data), -1, 1, group // 2)
    return torch.cat((halves & 15, halves >> 4), dim=2).flatten(1)


def _in_lanes(integers: Tensor, bits: int) -> Tensor:
    """uint8 [N, K] below 2**bits -> bytes [N, K or K / 2] in the order of lanes."""
    halves = 8 // bits
    # Columns of a word are (byte's last bit, half, byte's first bit).
    size = (len(integers), -1, WORDS, _LANES, 2, halves, 2)
    by_lanes = integers.view(size).permute(0, 1, 3, 2, 6, 4, 5)
    low, high = by_lanes[..., 0], by_lanes[..., -1]
    return (low if bits == 8 else low | (high << 4)).flatten(1)


def _pairs(scales: Tensor, offsets: Tensor, bits: int) -> Tensor | None:
    """Scales and zero points float16 [N, G, 2]; None if these are not exact."""
    zeros = zero_points(scales, offsets, bits)
    if zeros is None or not torch.equal(scales.half().float(), scales):
        return None
    return torch.stack((scales.half(), (zeros / ZERO_UNITS[bits]).half()), dim=-1)
