"""The KV cache of a model with several KV groups: one pool of pages, any of which serves any group.

It owns bytes only, as `LayerCache` does. Layers of all groups are views of the same memory: which
of them a page belongs to, the block tables say.
"""

import torch
from torch import Tensor

from kernels.reference import KvRows
from worker_svc.attention.kv_cache import zero_pages
from worker_svc.attention.kv_plan import KvPlan
from worker_svc.attention.layer_kv import LayerKv


class PageCache:
    """Keys and values by layer; a token's values follow its keys in memory."""

    def __init__(self, plan: KvPlan, num_blocks: int, device: torch.device) -> None:
        self.num_blocks = num_blocks
        self.block_size = plan.groups[0].block_size
        self.dtype = self.moved_dtype = plan.dtype
        self.block_shape: tuple[int, ...] = (plan.page_width,)
        self._plan = plan
        self._pages = zero_pages((num_blocks, plan.page_width), plan.dtype, device)
        self._views = [self._view(index) for index in range(len(plan.shapes))]

    constants: tuple[Tensor, ...] = ()  # values are stored as they are

    def of_layer(self, index: int) -> LayerKv:
        """The keys and values of the layer that stores as the index-th."""
        return self._views[index]

    def _view(self, index: int) -> LayerKv:
        shape, place = self._plan.shapes[index], self._plan.places[index]
        heads, k_dim, v_dim = shape.num_kv_heads, shape.k_dim, shape.v_dim
        num_rows = (self.num_blocks - 1) * place.rows_per_block + place.block_size

        def blocks(dim: int, first: int) -> Tensor:
            sizes = (self.num_blocks, place.block_size, heads, dim)
            strides = (self._plan.page_width, shape.width, dim, 1)
            return self._pages.as_strided(sizes, strides, place.first + first)

        def by_row(dim: int, first: int) -> Tensor:
            strides = (shape.width, dim, 1)
            return self._pages.as_strided((num_rows, heads, dim), strides, place.first + first)

        k_rows, v_rows = by_row(k_dim, 0), by_row(v_dim, heads * k_dim)
        rows: Tensor | KvRows = KvRows(k_rows, v_rows)
        if k_dim == v_dim:
            strides = (shape.width, heads * k_dim, k_dim, 1)
            rows = self._pages.as_strided((num_rows, 2, heads, k_dim), strides, place.first)
        k, v = blocks(k_dim, 0), blocks(v_dim, heads * k_dim)
        return LayerKv(k, v, rows, k_rows, v_rows, place=place)

    def read_blocks(self, block_ids: Tensor) -> Tensor:
        """A copy of blocks block_ids [n], as [n, *block_shape]."""
        return self._pages.index_select(0, block_ids)

    def write_blocks(self, block_ids: Tensor, content: Tensor) -> None:
        """Overwrites blocks block_ids [n], none twice, with content [n, *block_shape]."""
        self._pages.index_copy_(0, block_ids, content)
