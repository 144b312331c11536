"""The KV cache of a model whose layers differ: each with its own heads and sizes, some with none.

It owns bytes only, as `KVCache` does; a block has the same id in all layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.reference import KvRows
from worker_svc.attention.kv_cache import zero_pages


@dataclass(frozen=True, slots=True)
class KvShape:
    """Keys and values of one token in one layer."""

    num_kv_heads: int
    k_dim: int
    v_dim: int

    @property
    def width(self) -> int:
        """Numbers of a token."""
        return self.num_kv_heads * (self.k_dim + self.v_dim)


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """The place of one layer's keys and values in the blocks of its KV group."""

    group: int
    block_size: int  # tokens in a block
    first: int  # number of a block at which they begin
    rows_per_block: int  # from a row of one block to the same row of the next, in `rows`

    def rows_of(self, kv_slots: Tensor) -> Tensor:
        """Where in `rows` the KV slots of the group are."""
        if self.rows_per_block == self.block_size:
            return kv_slots
        blocks = kv_slots.div(self.block_size, rounding_mode="floor")
        return kv_slots + blocks * (self.rows_per_block - self.block_size)


class LayerCache:
    """Keys and values by layer; a token's values follow its keys in memory."""

    def __init__(
        self,
        shapes: Sequence[KvShape],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`shapes` are those of the layers that store anything, by index."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = self.moved_dtype = dtype
        self._shapes = tuple(shapes)
        self._layers = [
            zero_pages((num_blocks, block_size, shape.width), dtype, device) for shape in shapes
        ]
        self.block_shape: tuple[int, ...] = (block_size * sum(shape.width for shape in shapes),)

    def place(self, index: int) -> LayerPlace:
        """A layer's place: all layers have one group."""
        return LayerPlace(0, self.block_size, 0, self.block_size)

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """(k, v) of a layer, [num_blocks, block_size, Hkv, D] and the same of Dv."""
        shape = self._shapes[index]
        k, v = self._layers[index].tensor_split((shape.num_kv_heads * shape.k_dim,), dim=2)
        heads = shape.num_kv_heads
        by_head = self.num_blocks, self.block_size, heads
        return k.view(*by_head, shape.k_dim), v.view(*by_head, shape.v_dim)

    def rows(self, index: int) -> Tensor | KvRows:
        """A layer indexed by KV slot: [num_slots, 2, Hkv, D], or where sizes differ both apart."""
        shape, flat = self._shapes[index], self._layers[index].flatten(0, 1)
        if shape.k_dim == shape.v_dim:
            return flat.view(-1, 2, shape.num_kv_heads, shape.k_dim)
        k, v = self.layer(index)
        return KvRows(k.flatten(0, 1), v.flatten(0, 1))

    def read_blocks(self, block_ids: Tensor) -> Tensor:
        """A copy of blocks block_ids [n], as [n, *block_shape]."""
        parts = [layer.index_select(0, block_ids).flatten(1) for layer in self._layers]
        return torch.cat(parts, dim=1)

    def write_blocks(self, block_ids: Tensor, content: Tensor) -> None:
        """Overwrites blocks block_ids [n], none twice, with content [n, *block_shape]."""
        widths = [self.block_size * shape.width for shape in self._shapes]
        parts = torch.split(content, widths, dim=1)
        for layer, part in zip(self._layers, parts, strict=True):
            layer.index_copy_(0, block_ids, part.view(-1, *layer.shape[1:]))
