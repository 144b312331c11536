"""The KV cache of a model whose layers differ: each with its own heads and sizes, some with none.

It owns bytes only, as `KVCache` does; a block has the same id in all layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.reference import KvRows, LatentRows
from worker_svc.attention.kv_cache import zero_pages
from worker_svc.attention.layer_kv import LayerKv


@dataclass(frozen=True, slots=True)
class KvShape:
    """Keys and values of one token in one layer."""

    num_kv_heads: int
    k_dim: int
    v_dim: int
    is_latent: bool = False  # the values are the first `v_dim` dimensions of the keys

    @property
    def width(self) -> int:
        """Numbers of a token."""
        return self.num_kv_heads * (self.k_dim + (0 if self.is_latent else self.v_dim))


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
        self._views = [self._view(index) for index in range(len(self._shapes))]
        self.block_shape: tuple[int, ...] = (block_size * sum(shape.width for shape in shapes),)

    constants: tuple[Tensor, ...] = ()  # values are stored as they are

    def of_layer(self, index: int) -> LayerKv:
        """The keys and values of the layer that stores as the index-th."""
        return self._views[index]

    def _view(self, index: int) -> LayerKv:
        shape, blocks = self._shapes[index], self._layers[index]
        by_head = self.num_blocks, self.block_size, shape.num_kv_heads
        if shape.is_latent:
            k = blocks.view(*by_head, shape.k_dim)
            latent = LatentRows(k.flatten(0, 1), shape.v_dim)
            return LayerKv(k, k[..., : shape.v_dim], latent, latent.keys, latent.values)
        k, v = blocks.tensor_split((shape.num_kv_heads * shape.k_dim,), dim=2)
        k, v = k.view(*by_head, shape.k_dim), v.view(*by_head, shape.v_dim)
        k_rows, v_rows = k.flatten(0, 1), v.flatten(0, 1)
        rows: Tensor | KvRows = KvRows(k_rows, v_rows)
        if shape.k_dim == shape.v_dim:
            rows = blocks.flatten(0, 1).view(-1, 2, shape.num_kv_heads, shape.k_dim)
        return LayerKv(k, v, rows, k_rows, v_rows)

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
