"""The block tables of one KV group as columns: one row per slot, as the worker holds them."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scheduler_svc.core.kv.prefix_cache import NULL_BLOCK
from scheduler_svc.core.request.block_hash import NO_PARENT
from scheduler_svc.core.request.kv_groups import KvGroup
from scheduler_svc.core.request.request import TokenIds
from scheduler_svc.core.request.sequence import Sequence

Index = NDArray[np.intp]  # [n] slots, in numpy's fastest index type
MAX_INT32 = 2**31 - 1


@dataclass(slots=True)  # mutable for speed, as plans are
class TableRow:
    """The block table with which a sequence enters a slot."""

    block_ids: list[int]
    num_null: int  # leading null blocks among them
    num_sealed: int  # leading blocks that are in the prefix cache already


class BlockTable:
    """Columns indexed by slot. Only rows of live sequences are meaningful."""

    def __init__(
        self, number: int, group: KvGroup, max_model_len: int, token_ids: TokenIds
    ) -> None:
        """`token_ids` [slots, T] are those of all slots; T is a multiple of the block size."""
        max_num_seqs = len(token_ids)
        self.number = number  # of the group
        self.group = group
        self.block_size = group.block_size
        # Unused rows take address space, not memory.
        max_blocks = -(-max_model_len // group.block_size)
        self.block_table = np.empty((max_num_seqs, max_blocks), dtype=np.int32)
        self.token_blocks = token_ids.reshape(max_num_seqs, -1, group.block_size)  # same memory

        def column() -> NDArray[np.int32]:
            return np.zeros(max_num_seqs, dtype=np.int32)

        self.num_blocks = column()  # entries in the block table
        self.num_null = column()  # leading null blocks among them: before every window
        self.capacity = column()  # tokens that its blocks hold
        self.num_sealed = column()  # leading blocks in the prefix cache
        self.seal_at = column()  # tokens at which the next block can be sealed
        self.last_hash: NDArray[np.uint64] = np.zeros(max_num_seqs, dtype=np.uint64)

    def enter(self, sequence: Sequence, slot: int, row: TableRow) -> None:
        """Fills a slot's row."""
        num_blocks = len(row.block_ids)
        self.block_table[slot, :num_blocks] = row.block_ids
        self.num_blocks[slot] = num_blocks
        self.num_null[slot] = row.num_null
        self.capacity[slot] = num_blocks * self.block_size
        if sequence.is_private:
            self.never_seal(slot)
            return
        num_sealed = row.num_sealed
        self.num_sealed[slot] = num_sealed
        self.seal_at[slot] = (num_sealed + 1) * self.block_size
        hashes = sequence.block_hashes(self.block_size) if num_sealed else []
        self.last_hash[slot] = hashes[num_sealed - 1] if num_sealed else NO_PARENT

    def never_seal(self, slot: int) -> None:
        """Keeps a slot's blocks out of the prefix cache by counting all of them as sealed."""
        self.num_sealed[slot] = MAX_INT32 // self.block_size
        self.seal_at[slot] = MAX_INT32

    def blocks(self, slot: int) -> list[int]:
        """The block table of a slot's sequence."""
        block_ids: list[int] = self.block_table[slot, : self.num_blocks[slot]].tolist()
        return block_ids

    def held_blocks(self, slot: int) -> list[int]:
        """The block table of a slot's sequence without its leading null blocks."""
        row = self.block_table[slot, self.num_null[slot] : self.num_blocks[slot]]
        block_ids: list[int] = row.tolist()
        return block_ids

    def drop_blocks(self, slot: int, num_null: int) -> list[int]:
        """Replaces a slot's first `num_null` blocks by null blocks; returns the others' ids."""
        row = self.block_table[slot, self.num_null[slot] : num_null]
        dropped: list[int] = row.tolist()
        row[:] = NULL_BLOCK
        self.num_null[slot] = num_null
        return dropped

    def lacking(self, index: Index, num_tokens: NDArray[np.int32]) -> NDArray[np.int32]:
        """[n] blocks that slot index[i] lacks to hold num_tokens[i] tokens."""
        shortage = np.maximum(num_tokens - self.capacity[index], 0)
        lacking: NDArray[np.int32] = -(-shortage // self.block_size)
        return lacking

    def append_blocks(self, slot: int, block_ids: list[int]) -> None:
        """Appends blocks to a slot's block table."""
        end = int(self.num_blocks[slot])
        self.block_table[slot, end : end + len(block_ids)] = block_ids
        self.num_blocks[slot] += len(block_ids)
        self.capacity[slot] += len(block_ids) * self.block_size

    def append_block_each(self, index: Index, block_ids: list[int]) -> None:
        """Appends block_ids[i] to the block table of slot index[i]; no slot may occur twice."""
        self.block_table[index, self.num_blocks[index]] = block_ids
        self.num_blocks[index] += 1
        self.capacity[index] += self.block_size
