"""One rank's part of a tensor, cut out of a file's slice, or out of a tensor in memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from worker_svc.models.spec import UnsupportedModel
from worker_svc.models.weights import Share


@dataclass(frozen=True, slots=True)
class TensorCut:
    """One of `count` equal parts of each of `num_blocks` equal blocks along a dimension."""

    dim: int
    index: int
    count: int
    num_blocks: int = 1  # 2 where a tensor holds gates and, after all of them, what they let pass

    def require_equal(self, name: str, shape: Sequence[int]) -> None:
        """Raises UnsupportedModel for a shape that has no equal parts."""
        if shape[self.dim] % (self.count * self.num_blocks):
            raise UnsupportedModel(
                f"{name}: {shape[self.dim]} does not divide among tensor_parallel_size {self.count}"
            )

    def shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        """The part's shape."""
        return (*whole[: self.dim], whole[self.dim] // self.count, *whole[self.dim + 1 :])

    def of(self, whole: Any) -> Tensor:
        """The part of a Tensor, or of a slice of safetensors, which reads no more than that."""
        shape = whole.shape if isinstance(whole, Tensor) else whole.get_shape()
        block = shape[self.dim] // self.num_blocks
        length = block // self.count
        before = (slice(None),) * self.dim
        starts = [number * block + self.index * length for number in range(self.num_blocks)]
        parts = [whole[(*before, slice(start, start + length))] for start in starts]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=self.dim)

    def share(self, name: str) -> Share:
        """The cut for readers of parts that are one piece. Raises UnsupportedModel for others."""
        if self.num_blocks > 1:
            raise UnsupportedModel(
                f"{name}: tensor_parallel_size does not divide this tensor of a quantized "
                "checkpoint"
            )
        return Share(self.dim, self.index, self.count)


@dataclass(frozen=True, slots=True)
class LazyPart:
    """A tensor as transformers' loader takes it: `[...]` reads it, or this rank's part of it."""

    whole: Any  # a Tensor, or a slice of safetensors
    cut: TensorCut | None

    def __getitem__(self, everything: object) -> Tensor:
        found: Tensor = self.whole[...] if self.cut is None else self.cut.of(self.whole)
        return found
