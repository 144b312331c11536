"""The tiers of a worker without a model: blocks that it copies late, in part, or never."""

import numpy as np

from scheduler_svc.core import BlockTransfer, TransferOrders
from scheduler_svc.core.kv.chain import Keys
from scheduler_svc.core.kv.tier import TierName
from tests.scheduler_svc.core.fake_worker import FakeWorker

_BEING_WRITTEN = -1  # the content of what a transfer fills, until it is answered


class FakeTier:
    """Keeps what a worker's blocks hold by the keys that came with it."""

    def __init__(
        self, worker: FakeWorker, before: "FakeTier | None" = None, *, is_same: bool = True
    ) -> None:
        """The tiers of a worker that lives on, or has come back; what was stored then may be.

        One that has come back has what is on its disk alone.
        """
        self.fetches: dict[int, BlockTransfer] = {}  # not answered
        self.stores: dict[int, BlockTransfer] = {}
        self.cancelled: set[int] = set()
        self._worker = worker
        self._size = worker.groups[0].block_size
        # Key and content, by block.
        self._held: dict[int, tuple[tuple[int, ...], list[int | None]]] = {}
        self._dropped_stores: set[int] = set()
        self._files: dict[tuple[int, ...], tuple[list[int | None], bytes]] = {}  # by key
        if before is not None:
            self._held = before._held if is_same else {}
            self._files = before._files

    def order(self, orders: TransferOrders) -> None:
        """Takes orders; what is to be filled holds nothing of use from now on."""
        if orders.drops is not None:
            dropped = map(tuple, orders.drops.keys.tolist())
            for key in list(self._files) if orders.drops.is_all else dropped:
                self._files.pop(key, None)
            if orders.drops.is_all:  # what was asked for before is stored before
                self._dropped_stores.update(self.stores)
        for transfer in orders.fetches:
            self._write(transfer.block_ids, [[_BEING_WRITTEN] * self._size] * len(transfer.keys))
            self.fetches[transfer.transfer_id] = transfer
        for transfer in orders.stores:
            for block in transfer.tier_blocks if transfer.tier is TierName.HOST else ():
                self._held.pop(block, None)
            self.stores[transfer.transfer_id] = transfer
        assert self.unanswered.issuperset(orders.cancelled_ids), "cancelled, and never ordered"
        self.cancelled.update(orders.cancelled_ids)

    @property
    def disk_keys(self) -> Keys:
        """Keys of what its disk holds, the block stored longest ago first."""
        return np.array(list(self._files), dtype=np.uint64).reshape(-1, 2)

    def lose_files(self, num_files: int) -> None:
        """Loses the files stored longest ago, as if they had been removed."""
        for key in list(self._files)[:num_files]:
            del self._files[key]

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
        if fetch.tier is TierName.DISK:
            pairs = zip(fetch.keys.tolist(), fetch.contents, strict=True)
            for key, content in list(pairs)[:most]:
                cells, told = self._files.get(tuple(key), (None, b""))
                if cells is None or told != content:
                    break
                contents.append(cells)
            self._write(fetch.block_ids, contents)
            return len(contents)
        for block, key in zip(fetch.tier_blocks, fetch.keys[:most].tolist(), strict=False):
            found, content = self._held[block]
            assert found == tuple(key), f"block {block} of the tier holds another content"
            contents.append(content)
        self._write(fetch.block_ids, contents)
        return len(contents)

    def _store(self, store: BlockTransfer, most: int) -> int:
        is_disk = store.tier is TierName.DISK
        triples = zip(store.block_ids, store.tier_blocks, store.keys.tolist(), strict=True)
        for index, (block_id, block, key) in enumerate(list(triples)[:most]):
            cells = [self._worker.kv.get((block_id, offset)) for offset in range(self._size)]
            if is_disk and store.transfer_id in self._dropped_stores:
                continue
            if is_disk:
                self._files[tuple(key)] = cells, store.contents[index]
            else:
                self._held[block] = tuple(key), cells
        return min(most, len(store.block_ids))

    def _write(self, block_ids: list[int], contents: list[list[int | None]]) -> None:
        for block_id, cells in zip(block_ids, contents, strict=False):
            for offset, content in enumerate(cells):
                assert content is not None, "a part of a block was never computed"
                self._worker.kv[block_id, offset] = content
