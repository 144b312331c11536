"""The KV-cache memory of one worker, layer by layer.

It owns bytes only; which block belongs to whom is the scheduler's knowledge.
"""

import math

import numpy as np
import torch
from torch import Tensor


def block_bytes(
    num_layers: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> int:
    """Bytes of one block over all layers, K and V."""
    return 2 * num_layers * block_size * num_kv_heads * head_dim * dtype.itemsize


class KVCache:
    """K and V of every layer; a token's V follows its K in memory, so that one read gets both."""

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        shape = (num_layers, num_blocks, block_size, 2, num_kv_heads, head_dim)
        self._layers = _zeros(shape, dtype, device).unbind()
        self._rows = [layer.flatten(0, 1) for layer in self._layers]

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """(k, v) of a layer, each [num_blocks, block_size, Hkv, D]."""
        k, v = self._layers[index].unbind(2)
        return k, v

    def rows(self, index: int) -> Tensor:
        """A layer by slot, [num_blocks * block_size, 2, Hkv, D]."""
        return self._rows[index]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, because what is read past a context is masked, and a mask does not hide NaN."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy's zeros are the system's untouched pages: blocks never used cost neither memory nor the
    # seconds that writing gigabytes of zeros takes at start-up.
    pages = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(pages).view(dtype).view(shape)
