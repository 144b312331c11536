"""A tensor of a checkpoint whose outputs alternate, which here follow one after the other."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from worker_svc.models.linear import Linear, Narrow, WeightRows


@dataclass(frozen=True, slots=True)
class Interleaved:
    """A destination: rows of several parts of a linear layer, some of each part for each group."""

    parts: Sequence[WeightRows]
    num_groups: int

    @classmethod
    def of(cls, linear: Linear, sizes: Sequence[int], num_groups: int) -> "Interleaved":
        """Consecutive parts of these numbers of rows, from the first on."""
        ends = itertools.accumulate(sizes)
        rows = (linear.rows(end - size, end) for size, end in zip(sizes, ends, strict=True))
        return cls(tuple(rows), num_groups)

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the checkpoint's tensor."""
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """The type of float numbers."""
        return self.parts[0].dtype

    def copy_(self, values: Tensor) -> None:
        """Fills the parts with float numbers of any type and device."""
        for part, rows in zip(self.parts, self._of_parts(values), strict=True):
            part.copy_(rows)

    def put_narrow(self, values: Narrow) -> None:
        """Fills the parts in fewer bits."""
        rows = torch.arange(values.shape[0], device=values.scales.device)
        for part, outputs in zip(self.parts, self._of_parts(rows), strict=True):
            part.put_narrow(values.select(outputs))

    def _of_parts(self, rows: Tensor) -> list[Tensor]:
        """Rows [N, ...] of the checkpoint's tensor -> those of each part."""
        sizes = [part.shape[0] // self.num_groups for part in self.parts]
        by_group = rows.reshape(self.num_groups, sum(sizes), *rows.shape[1:])
        of_groups = by_group.split_with_sizes(sizes, 1)
        return [part.flatten(0, 1) for part in of_groups]
