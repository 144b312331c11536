"""The KV-cache memory of one worker, layer by layer.

It owns bytes only; the scheduler assigns blocks to sequences.
"""

import math
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from kernels import fp8
from worker_svc.attention.layer_kv import LayerKv
from worker_svc.device.host_memory import pinned_bytes

_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


class PagedCache(Protocol):
    """Keys and values in blocks, moved whole."""

    num_blocks: int
    block_size: int
    dtype: torch.dtype
    moved_dtype: torch.dtype  # of blocks while they are moved

    @property
    def block_shape(self) -> tuple[int, ...]:
        """The shape of one block over all layers."""

    @property
    def constants(self) -> tuple[Tensor, ...]:
        """Tensors that stored values are read with: where these differ, so do equal bytes."""

    def read_blocks(self, block_ids: Tensor) -> Tensor:
        """A copy of blocks block_ids [n], as [n, *block_shape] of `moved_dtype`."""

    def write_blocks(self, block_ids: Tensor, content: Tensor) -> None:
        """Overwrites blocks block_ids [n], none twice, with content [n, *block_shape]."""


class KVCache:
    """K and V of every layer; a token's V follows its K in memory, so that one read gets both.

    A cache in FP8 has a table of scales for each layer, and offsets of keys (`kernels.fp8`).
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        scales: Tensor | None = None,
        key_offsets: Tensor | None = None,
    ) -> None:
        """`scales` [num_layers, 4, Hkv] are for FP8 alone; without them they are 1.

        `key_offsets` [num_layers, Hkv, D] are for FP8 alone, too; without them they are 0.
        """
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        self.block_shape: tuple[int, ...] = (num_layers, block_size, 2, num_kv_heads, head_dim)
        shape = (num_layers, num_blocks, block_size, 2, num_kv_heads, head_dim)
        # FP8 is moved as bytes: torch does not index it on every device.
        self.moved_dtype = torch.uint8 if fp8.is_fp8(dtype) else dtype
        self._blocks = zero_pages(shape, self.moved_dtype, device)
        # Blocks are moved in words: a GPU gathers words of eight bytes in a quarter of the time.
        self._words = _in_words(self._blocks, 2)  # [L, num_blocks, W]
        self._scales: tuple[Tensor, ...] | None = None
        self._key_offsets: tuple[Tensor, ...] | None = None
        if fp8.is_fp8(dtype):
            ones = torch.ones((num_layers, 4, num_kv_heads), device=device)
            self._scales = (ones if scales is None else scales).unbind()
            zeros = torch.zeros((num_layers, num_kv_heads, head_dim), device=device)
            self._key_offsets = (zeros if key_offsets is None else key_offsets).unbind()
        # Views are made once: a step of a CPU would make several for each layer.
        self._rows = [layer.flatten(0, 1) for layer in self._blocks.view(dtype).unbind()]
        self._layers = [self._view(index) for index in range(num_layers)]

    def _view(self, index: int) -> LayerKv:
        scales = None if self._scales is None else self._scales[index]
        offsets = None if self._key_offsets is None else self._key_offsets[index]
        return LayerKv.of(self._rows[index], self.block_size, scales, offsets)

    @property
    def constants(self) -> tuple[Tensor, ...]:
        """Scales and key offsets of a cache in FP8, layer by layer; none otherwise."""
        return (*(self._scales or ()), *(self._key_offsets or ()))

    def of_layer(self, index: int) -> LayerKv:
        """The keys and values of a layer."""
        return self._layers[index]

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """(k, v) of a layer, each [num_blocks, block_size, Hkv, D]."""
        kv = self._layers[index]
        return kv.k, kv.v

    def rows(self, index: int) -> Tensor:
        """A layer indexed by KV slot, [num_blocks * block_size, 2, Hkv, D]."""
        return self._rows[index]

    def read_blocks(self, block_ids: Tensor) -> Tensor:
        """A copy of blocks block_ids [n], as [n, *block_shape] of `moved_dtype`."""
        words = self._words.index_select(1, block_ids).transpose(0, 1).contiguous()
        return words.view(self.moved_dtype).view(-1, *self.block_shape)

    def write_blocks(self, block_ids: Tensor, content: Tensor) -> None:
        """Overwrites blocks block_ids [n], none twice, with content [n, *block_shape]."""
        self._words.index_copy_(1, block_ids, _in_words(content, 2).transpose(0, 1))


def _in_words(blocks: Tensor, num_dims: int) -> Tensor:
    """The contiguous tensor's first dimensions, and what they hold as words of up to 8 bytes."""
    rows = blocks.flatten(num_dims)
    row_bytes = rows.shape[-1] * rows.element_size()
    word = next(word for word in _WORDS if row_bytes % word.itemsize == 0)
    return rows.view(word)


def empty_pages(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Host memory for swapped blocks: pinned where copies run concurrently with the host."""
    if not math.prod(shape):
        return torch.empty(shape, dtype=dtype)
    if device.type == "cuda":
        return pinned_bytes(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)
    return zero_pages(shape, dtype, device)


def zero_pages(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, because values read past a context are masked, and a mask does not hide NaN."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy's zeros are untouched pages of the system: unused blocks take no memory, and start-up
    # does not spend seconds on writing gigabytes of zeros.
    pages = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(pages).view(dtype).view(shape)
