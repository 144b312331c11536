"""Sealing: adds blocks with known and computed tokens to the prefix cache."""

import numpy as np
from numpy.typing import NDArray

from scheduler_svc.core.kv.prefix_cache import PrefixCache
from scheduler_svc.core.kv.slots import Index, SlotTable
from scheduler_svc.core.request import block_hash


def seal(table: SlotTable, cache: PrefixCache, index: Index, covered: NDArray[np.int32]) -> None:
    """Seals the blocks of these slots that the first `covered[i]` tokens of each fill.

    A block is full when the tokens up to its end are known and computed, or will be by a step that
    cannot be taken back: the newest token of a sequence has no KV before the next step.
    """
    rows = (covered >= table.seal_at[index]).nonzero()[0]
    if not len(rows):
        return
    due = index[rows]
    sealed, num_full = table.num_sealed[due], covered[rows] // table.block_size
    is_next = (num_full == sealed + 1) & (sealed > 0)
    if table.origin_slots:  # a block with a part of a picture is hashed over more than its tokens
        is_next &= sealed * table.block_size >= table.extras_end[due]
    num_next = np.count_nonzero(is_next)
    if num_next == len(due):  # nearly every decode step
        _seal_next(table, cache, due, sealed)
        return
    if num_next:
        _seal_next(table, cache, due[is_next], sealed[is_next])
    for slot, until in zip(due[~is_next].tolist(), num_full[~is_next].tolist(), strict=True):
        _seal_until(table, cache, slot, until)


def seal_slot(table: SlotTable, cache: PrefixCache, slot: int) -> None:
    """Seals the full blocks of one slot."""
    until = int(min(table.num_computed[slot], table.num_tokens[slot])) // table.block_size
    if until > table.num_sealed[slot]:
        _seal_until(table, cache, slot, until)


def _seal_next(
    table: SlotTable, cache: PrefixCache, index: Index, sealed: NDArray[np.int32]
) -> None:
    """Seals one more block of each slot; each has a sealed block already."""
    place = index, sealed.astype(np.intp)
    token_ids = table.token_blocks[place]  # [slots, block_size]
    parents = table.last_hash[index]
    hashes = block_hash.extend(parents, token_ids)
    origins = table.origin[index] if table.origin_slots else None
    cache.insert(table.block_table[place], hashes, parents, token_ids, origins)
    table.last_hash[index] = hashes
    table.num_sealed[index] = sealed + 1
    table.seal_at[index] += table.block_size


def _seal_until(table: SlotTable, cache: PrefixCache, slot: int, until: int) -> None:
    """Seals a slot's blocks up to (not including) `until`."""
    sequence, begin = table.sequence[slot], int(table.num_sealed[slot])
    assert sequence is not None
    size = table.block_size
    token_ids = table.token_ids[slot, : until * size]
    hashes = sequence.extend_hashes(token_ids, size)[:until]
    parents = np.array([sequence.root, *hashes], dtype=np.uint64)[begin:until]
    block_ids = table.block_table[slot, begin:until]
    content, origins = token_ids.reshape(-1, size)[begin:], sequence.origins
    of_blocks = None if origins is None else origins.of_blocks(begin, until, size)
    cache.insert(block_ids, hashes[begin:], parents, content, of_blocks)
    table.last_hash[slot] = hashes[-1]
    table.num_sealed[slot] = until
    table.seal_at[slot] = (until + 1) * size
