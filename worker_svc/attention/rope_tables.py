"""Cosines and sines for the rotations of layers; layers that rotate alike share a table."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class RopeTables:
    """All different tables of a model, and the one that each layer takes."""

    # [P, R] float32 each: R/2 cosines, then R/2 sines, per position, of the R dimensions that turn.
    tables: tuple[Tensor, ...]
    of_layer: tuple[int, ...]  # the index in `tables`, by layer

    def layer(self, index: int) -> Tensor:
        """The table of a layer."""
        return self.tables[self.of_layer[index]]
