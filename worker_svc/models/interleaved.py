"""A tensor of a checkpoint whose outputs alternate, which here follow one after the other."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from worker_svc.models.linear import Linear, WeightRows


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
    def shape(self) -> tuple[int, ...]:
        """The shape of the checkpoint's tensor."""
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    def copy_(self, values: Tensor) -> None:
        """Fills the parts with float numbers of any type and device."""
        sizes = [part.shape[0] // self.num_groups for part in self.parts]
        of_groups = values.reshape(self.num_groups, -1, values.shape[1]).split_with_sizes(sizes, 1)
        for part, rows in zip(self.parts, of_groups, strict=True):
            part.copy_(rows.flatten(0, 1))
