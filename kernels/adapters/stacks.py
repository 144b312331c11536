"""The memory of adapters on the device, and the rows of a step that they compute.

Each place holds one adapter as a row of `values`: of each linear layer A, then B, one layer after
the other. An adapter has one stride R of ranks for all of its layers, a multiple of `RANK_MULTIPLE`
with zeros at the end, so each part of its row begins at R times a number that the model decides:

    A [parts * R, K] at R * a_at        B [N, R] at R * b_at

It knows neither where adapters come from nor which has which place.
"""

from dataclasses import dataclass

import torch

RANK_MULTIPLE = 16  # the fewest ranks that tensor cores multiply


@dataclass(frozen=True, slots=True)
class AdapterStacks:
    """Adapters of all places."""

    values: torch.Tensor  # [places, most values of an adapter]
    # [places, 1 + layers] int32: the stride, then each layer's ranks; 0: the adapter lacks it
    ranks: torch.Tensor
    max_rank: int  # of any adapter, a multiple of RANK_MULTIPLE


@dataclass(frozen=True, slots=True)
class AdaptedLayer:
    """One linear layer [N, K] with A and B: its outputs are parts, each with ranks of its own."""

    index: int  # among the layers of `AdapterStacks.ranks`, from 1 on
    num_inputs: int
    num_outputs: int  # N: up to the last that a part has; a layer may have more
    parts: tuple[tuple[int, int], ...]  # outputs [begin, end) of each, ascending
    a_at: int  # values before A and B, for each rank of the stride
    b_at: int
    blocks: torch.Tensor  # [blocks, 3] int32: a part, and outputs [begin, end) of it


@dataclass(frozen=True, slots=True)
class RowGroups:
    """The rows of a batch by their adapter: tiles of rows that have the same one.

    Rows without an adapter are in no tile.
    """

    order: torch.Tensor  # [T] int32: rows, those of one adapter back to back
    tiles: torch.Tensor  # [N, 3] int32: place of an adapter or -1, first in `order`, how many
    tile_rows: int  # that a tile has at most
