"""Token embeddings, sharded by vocabulary."""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.quantized.grouped import GroupedWeight
from worker_svc.parallel.group import Group


class Embedding:
    """This rank's rows of the embedding table [V, hidden], from `first_token` on."""

    def __init__(self, table: Tensor, first_token: int, group: Group, scale: float = 1.0) -> None:
        """Rows are multiplied by `scale` when they are read; a head may be the same table."""
        self.scale = _rounded(scale, table.dtype)
        self.table = table
        self.first_token = first_token
        self._group = group

    def __call__(self, token_ids: Tensor) -> Tensor:
        """Token ids [T] -> embeddings [T, hidden], complete on all ranks."""
        rows = self._rows(token_ids)
        return rows if self.scale == 1.0 else rows.mul_(self.scale)

    def _rows(self, token_ids: Tensor) -> Tensor:
        if self._group.size == 1:
            return F.embedding(token_ids, self.table)
        rows = token_ids - self.first_token
        is_elsewhere = (rows < 0) | (rows >= len(self.table))
        part = F.embedding(rows.masked_fill(is_elsewhere, 0), self.table)
        return self._group.all_reduce(part.masked_fill_(is_elsewhere[:, None], 0))


class IntegerEmbedding:
    """A whole table [V, hidden] of integers; rows become float numbers of the dtype when read."""

    def __init__(self, table: GroupedWeight, dtype: torch.dtype, scale: float = 1.0) -> None:
        self._table = table
        self._dtype = dtype
        self._scale = _rounded(scale, dtype)

    def __call__(self, token_ids: Tensor) -> Tensor:
        """Token ids [T] -> embeddings [T, hidden]."""
        rows = self._table.select(token_ids).dequantized(self._dtype)
        return rows if self._scale == 1.0 else rows.mul_(self._scale)


def _rounded(scale: float, dtype: torch.dtype) -> float:
    """The scale as a number of the type, as families multiply by it."""
    return float(torch.tensor(scale, dtype=dtype))
