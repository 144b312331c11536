"""Sealing: adds blocks with known and computed tokens to the prefix cache."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from scheduler_svc.core.kv.block_table import BlockTable
from scheduler_svc.core.kv.prefix_cache import BlockKeys, PrefixCache
from scheduler_svc.core.kv.slots import Index, SlotTable
from scheduler_svc.core.request import block_hash
from scheduler_svc.core.request.request import Request

Caches = tuple[PrefixCache, ...]  # by group


def seal(table: SlotTable, caches: Caches, index: Index, covered: NDArray[np.int32]) -> None:
    """Seals the blocks of these slots that the first `covered[i]` tokens of each fill.

    A block is full when the tokens up to its end are known and computed, or will be by a step that
    cannot be taken back: the newest token of a sequence has no KV before the next step.
    """
    for blocks in table.tables:  # a loop over both would take a hundredth of a step
        rows = (covered >= blocks.seal_at[index]).nonzero()[0]
        if not len(rows):
            continue
        due, cache = index[rows], caches[blocks.number]
        sealed, num_full = blocks.num_sealed[due], covered[rows] // blocks.block_size
        is_next = (num_full == sealed + 1) & (sealed > 0)
        if table.origin_slots:  # a block with a part of a picture is hashed over more than tokens
            is_next &= sealed * blocks.block_size >= table.extras_end[due]
        num_next = np.count_nonzero(is_next)
        if num_next == len(due):  # nearly every decode step
            _seal_next(table, blocks, cache, due, sealed)
            continue
        if num_next:
            _seal_next(table, blocks, cache, due[is_next], sealed[is_next])
        for slot, until in zip(due[~is_next].tolist(), num_full[~is_next].tolist(), strict=True):
            _seal_until(table, blocks, cache, slot, until)


def seal_slot(table: SlotTable, caches: Caches, slot: int) -> None:
    """Seals the full blocks of one slot."""
    covered = int(min(table.num_computed[slot], table.num_tokens[slot]))
    for blocks in table.tables:
        until = covered // blocks.block_size
        if until > blocks.num_sealed[slot]:
            _seal_until(table, blocks, caches[blocks.number], slot, until)


def _seal_next(
    table: SlotTable,
    blocks: BlockTable,
    cache: PrefixCache,
    index: Index,
    sealed: NDArray[np.int32],
) -> None:
    """Seals one more block of each slot; each has a sealed block already."""
    place = index, sealed.astype(np.intp)
    token_ids = blocks.token_blocks[place]  # [slots, block_size]
    parents = blocks.last_hash[index]
    hashes = block_hash.extend(parents, token_ids)
    origins = table.origin[index] if table.origin_slots else None
    keys: list[BlockKeys] = []
    if cache.changes is not None:
        for sequence, block in zip(map(table.sequence.__getitem__, index), sealed, strict=True):
            assert sequence is not None
            keys += keys_of(sequence.request, (int(block),), blocks.block_size)
    cache.insert(blocks.block_table[place], hashes, parents, token_ids, origins, keys)
    blocks.last_hash[index] = hashes
    blocks.num_sealed[index] = sealed + 1
    blocks.seal_at[index] += blocks.block_size


def _seal_until(
    table: SlotTable, blocks: BlockTable, cache: PrefixCache, slot: int, until: int
) -> None:
    """Seals a slot's blocks up to (not including) `until`."""
    sequence, begin = table.sequence[slot], int(blocks.num_sealed[slot])
    assert sequence is not None
    size = blocks.block_size
    token_ids = table.token_ids[slot, : until * size]
    hashes = sequence.extend_hashes(token_ids, size)[:until]
    parents = np.array([sequence.root, *hashes], dtype=np.uint64)[begin:until]
    block_ids = blocks.block_table[slot, begin:until]
    content, origins = token_ids.reshape(-1, size)[begin:], sequence.origins
    of_blocks = None if origins is None else origins.of_blocks(begin, until, size)
    keys = () if cache.changes is None else keys_of(sequence.request, range(begin, until), size)
    cache.insert(block_ids, hashes[begin:], parents, content, of_blocks, keys)
    blocks.last_hash[slot] = hashes[-1]
    blocks.num_sealed[slot] = until
    blocks.seal_at[slot] = (until + 1) * size


def keys_of(request: Request, blocks: Iterable[int], size: int) -> list[BlockKeys]:
    """The parts of some blocks' contents besides their tokens."""
    salt = (request.cache_salt,) if request.cache_salt else ()
    return [
        BlockKeys(
            block == 0,
            (() if block else salt)
            + tuple(
                f"{extra.content_id:032x}"
                for extra in request.extras
                if extra.begin < (block + 1) * size and block * size < extra.end
            ),
            request.adapter_id,
        )
        for block in blocks
    ]
