"""Cosines and sines for the rotations of layers; layers that rotate alike share a table."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class RopeTables:
    """All different tables of a model, and the one that each layer takes."""

    tables: tuple[Tensor, ...]  # [P, D] float32 each: D/2 cosines, then D/2 sines, per position
    of_layer: tuple[int, ...]  # the index in `tables`, by layer

    def layer(self, index: int) -> Tensor:
        """The table of a layer."""
        return self.tables[self.of_layer[index]]
