"""The tier of a worker without a model: blocks that it copies late, in part, or never."""

from scheduler_svc.core import BlockTransfer, TransferOrders
from tests.scheduler_svc.core.fake_worker import FakeWorker

_BEING_WRITTEN = -1  # the content of what a transfer fills, until it is answered


class FakeTier:
    """Keeps what a worker's blocks hold by the keys that came with it."""

    def __init__(self, worker: FakeWorker, before: "FakeTier | None" = None) -> None:
        """A tier with what it held before, if the worker lives on; what was stored then may be."""
        self.fetches: dict[int, BlockTransfer] = {}  # not answered
        self.stores: dict[int, BlockTransfer] = {}
        self.cancelled: set[int] = set()
        self._worker = worker
        self._size = worker.groups[0].block_size
        # Key and content, by block.
        self._held: dict[int, tuple[tuple[int, ...], list[int | None]]] = {}
        if before is not None:
            self._held = before._held

    def order(self, orders: TransferOrders) -> None:
        """Takes orders; what is to be filled holds nothing of use from now on."""
        for transfer in orders.fetches:
            self._write(transfer.block_ids, [[_BEING_WRITTEN] * self._size] * len(transfer.keys))
            self.fetches[transfer.transfer_id] = transfer
        for transfer in orders.stores:
            for block in transfer.tier_blocks:
                self._held.pop(block, None)
            self.stores[transfer.transfer_id] = transfer
        assert self.unanswered.issuperset(orders.cancelled_ids), "cancelled, and never ordered"
        self.cancelled.update(orders.cancelled_ids)

    @property
    def unanswered(self) -> set[int]:
        """Ids of the transfers that are not answered."""
        return {*self.fetches, *self.stores}

    def answer(self, transfer_id: int, most: int) -> int:
        """Ends a transfer after `most` of its blocks; returns how many are whole."""
        if (store := self.stores.pop(transfer_id, None)) is not None:
            return self._store(store, most)
        fetch = self.fetches.pop(transfer_id)
        contents = list[list[int | None]]()
        for block, key in zip(fetch.tier_blocks, fetch.keys[:most].tolist(), strict=False):
            found, content = self._held[block]
            assert found == tuple(key), f"block {block} of the tier holds another content"
            contents.append(content)
        self._write(fetch.block_ids, contents)
        return len(contents)

    def _store(self, store: BlockTransfer, most: int) -> int:
        triples = zip(store.block_ids, store.tier_blocks, store.keys.tolist(), strict=True)
        for block_id, block, key in list(triples)[:most]:
            cells = [self._worker.kv.get((block_id, offset)) for offset in range(self._size)]
            self._held[block] = tuple(key), cells
        return min(most, len(store.block_ids))

    def _write(self, block_ids: list[int], contents: list[list[int | None]]) -> None:
        for block_id, cells in zip(block_ids, contents, strict=False):
            for offset, content in enumerate(cells):
                assert content is not None, "a part of a block was never computed"
                self._worker.kv[block_id, offset] = content
