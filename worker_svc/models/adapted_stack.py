"""Layers that graphs record, for passes with rows that have adapters."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from worker_svc.adapters.on_device import DeviceAdapters
from worker_svc.attention.batch import AttentionBatch, LastTokens
from worker_svc.attention.kv_cache import PagedCache
from worker_svc.models.layer_stack import LayerStack, TileHeads


class AdaptedStack:
    """A stack whose linear layers ask for what the adapters of a batch's rows add.

    It tells them whose rows they compute, which a batch knows: those of the last tokens are others.
    """

    def __init__(self, layers: LayerStack, adapters: DeviceAdapters) -> None:
        self._layers = layers
        self._adapters = adapters

    @property
    def max_adapters(self) -> int:
        """Adapters that the rows of a step may have together."""
        return self._adapters.num_places

    @property
    def splits(self) -> bool:
        """The layers' `splits`."""
        return self._layers.splits

    @property
    def carried_widths(self) -> tuple[int, int]:
        """The layers' `carried_widths`."""
        return self._layers.carried_widths

    @property
    def tile_heads(self) -> TileHeads:
        """The layers' `tile_heads`."""
        return self._layers.tile_heads

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv_cache: PagedCache,
        batch: AttentionBatch,
        last: LastTokens | None = None,
    ) -> Tensor:
        """Token ids [T] -> normed hidden states [T, hidden], or with `last` [R, hidden]."""
        if last is not None:
            carried = self.begin(token_ids, positions, kv_cache, batch)
            residual, other = (each.index_select(0, last.rows) for each in carried)
            if not len(last.rows):
                return residual
            return self.finish((residual, other), kv_cache, last.attention)
        with self._of(batch):
            return self._layers.forward(token_ids, positions, kv_cache, batch)

    def begin(
        self, token_ids: Tensor, positions: Tensor, kv_cache: PagedCache, batch: AttentionBatch
    ) -> tuple[Tensor, Tensor]:
        """All that every token needs -> what is carried, [T, width] each."""
        with self._of(batch):
            return self._layers.begin(token_ids, positions, kv_cache, batch)

    def finish(
        self, carried: tuple[Tensor, Tensor], kv_cache: PagedCache, batch: AttentionBatch
    ) -> Tensor:
        """The rest for rows [R] of what is carried -> normed hidden states [R, hidden]."""
        with self._of(batch):
            return self._layers.finish(carried, kv_cache, batch)

    def rehearsed(self) -> "AdaptedStack":
        """A stack that launches every kind of kernel at less cost."""
        return AdaptedStack(self._layers.rehearsed(), self._adapters)

    @contextmanager
    def _of(self, batch: AttentionBatch) -> Iterator[None]:
        """While this lasts, the layers are launched for the rows of this batch."""
        self._adapters.rows = batch.adapters
        try:
            yield
        finally:
            self._adapters.rows = None
