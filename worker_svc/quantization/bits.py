"""Small integers out of 32-bit words, and groups of columns.

The lowest bits of a word are its first element unless a format says otherwise.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.quantized.grouped import GroupedWeight
from worker_svc.quantization.scheme import DamagedWeight, StoredWeight

WORD_BITS = 32


def unpacked(words: Tensor, bits: int, dim: int, length: int | None = None) -> Tensor:
    """int32 words -> uint8 elements, each word's along `dim`, where `length` are kept."""
    shifts = torch.arange(0, WORD_BITS, bits, dtype=torch.int32)
    mask = (1 << bits) - 1
    parts = [(words >> int(shift)).bitwise_and_(mask).to(torch.uint8) for shift in shifts]
    elements = torch.stack(parts, dim=dim + 1).flatten(dim, dim + 1)
    return elements if length is None else elements.narrow(dim, 0, length)


@dataclass(frozen=True, slots=True)
class Groups:
    """`(q - z) s` with a scale and a zero for each group of columns."""

    scales: Tensor  # [N, groups]
    zeros: Tensor  # [N, groups], of any type
    bits: int

    def of(self, integers: Tensor) -> GroupedWeight:
        """The weight of integers [N, K] whose columns are in groups of equal size."""
        if integers.shape[1] % self.scales.shape[1]:
            raise DamagedWeight(
                f"scales: {self.scales.shape[1]} groups do not divide the {integers.shape[1]} "
                "inputs of a rank"
            )
        scales = self.scales.float().contiguous()
        offsets = self.zeros.float().neg().mul(scales)
        return GroupedWeight(integers.contiguous(), scales, offsets, self.bits)

    def by_index(self, integers: Tensor, index: Tensor, name: str, size: int) -> StoredWeight:
        """The same with the group of each column, `size` columns a group in the whole weight.

        A plain weight where the columns of a group do not lie together. `name` is the index's.
        """
        num_groups, at = self.scales.shape[1], index.long()
        if bool((at < 0).any()) or bool((at >= num_groups).any()):
            raise DamagedWeight(f"{name}: has a group outside 0 to {num_groups - 1}")
        runs = at.view(-1, size) if len(at) % size == 0 else at[:, None]
        if runs.shape[1] == size and bool((runs == runs[:, :1]).all()):
            first = runs[:, 0]
            return Groups(self.scales[:, first], self.zeros[:, first], self.bits).of(integers)
        centred = integers.float().sub_(self.zeros[:, at])
        return centred.mul_(self.scales.float()[:, at])
