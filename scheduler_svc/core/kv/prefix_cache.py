"""Index of cached blocks by content: from a block hash to a block id, verified.

The index knows content only; the pool knows whether a block is in use. An entry lives until the
pool hands the block out again, so a hit never refers to overwritten memory.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scheduler_svc.core.kv.cache_changes import BlockRemoved, BlockStored, CacheChanges
from scheduler_svc.core.request.block_hash import NO_PARENT
from scheduler_svc.core.request.identity import Digests
from scheduler_svc.core.request.request import TokenIds

NO_ORIGIN = 0  # both halves of the origin of a block that has none
NULL_BLOCK = 0  # filler of block tables, never handed out


@dataclass(frozen=True, slots=True)
class BlockKeys:
    """Parts of a block's content besides its tokens and the block before it."""

    is_first: bool  # of its chain
    texts: tuple[str, ...]  # salt, pictures
    adapter_id: str


class PrefixCache:
    """Hash to block, with duplicates: equal content computed twice may be in two blocks.

    Each KV group has its own, over the blocks of one pool.
    """

    def __init__(
        self, num_blocks: int, block_size: int, is_cached: "array[int] | None" = None
    ) -> None:
        """`is_cached` is a flag per block that the caches of a pool share."""
        self._block_size = block_size
        self._block_of: dict[int, int] = {}
        self._duplicates: dict[int, list[int]] = {}
        self._hash_of: dict[int, int] = {}
        self.is_cached = is_cached or array("B", bytes(num_blocks))  # 1 for the above
        self._tokens = np.zeros((num_blocks, block_size), dtype=np.int32)
        self._parents = np.zeros(num_blocks, dtype=np.uint64)
        # [num_blocks, 2] origins; None before the first block that has one.
        self._origins: Digests | None = None
        self.num_evictions = 0  # contents forgotten because their block was reused
        self.changes: CacheChanges | None = None  # None: no one follows them
        self.group = 0  # its number, for those who follow

    def __len__(self) -> int:
        return len(self._hash_of)

    def hash_of(self, block_id: int) -> int | None:
        """The hash of a block's content; None when it is not in the cache."""
        return self._hash_of.get(block_id)

    def likely(self, hashes: Sequence[int]) -> list[int]:
        """The blocks that `lookup` finds, unless a hash of theirs collides."""
        found: list[int] = []
        for block_hash in hashes:
            block_id = self._block_of.get(block_hash)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def lookup(
        self,
        hashes: Sequence[int],
        token_ids: TokenIds,
        root: int = NO_PARENT,
        origins: Digests | None = None,
    ) -> list[int]:
        """The blocks of the longest cached prefix of `token_ids`, given the hashes of its blocks.

        `root` is the parent of the first block, `origins` [blocks, 2] are those of all. Stops at
        the first block that is missing or whose content differs.
        """
        found = self.likely(hashes)
        return found[: self._num_equal(found, hashes, token_ids, root, origins)]

    def lookup_runs(
        self,
        hashes: Sequence[int],
        token_ids: TokenIds,
        root: int,
        origins: Digests | None = None,
    ) -> tuple[list[int], list[int]]:
        """For a group with a window, which reads the end of a prefix alone: all blocks that exist.

        Returns (block ids, of which those that are missing mean nothing; for each block, how many
        in a row exist up to it).
        """
        if not hashes:
            return [], []
        found = [self._block_of.get(block_hash, NULL_BLOCK) for block_hash in hashes]
        is_here = self._is_equal(found, hashes, token_ids, root, origins)
        is_here &= np.array(found) != NULL_BLOCK
        num_in_a_row, runs = 0, []
        for is_next_here in is_here.tolist():
            num_in_a_row = num_in_a_row + 1 if is_next_here else 0
            runs.append(num_in_a_row)
        return found, runs

    def _num_equal(
        self,
        found: list[int],
        hashes: Sequence[int],
        token_ids: TokenIds,
        root: int,
        origins: Digests | None,
    ) -> int:
        if not found:
            return 0
        equal = self._is_equal(found, hashes, token_ids, root, origins)
        return len(found) if equal.all() else int(equal.argmin())

    def _is_equal(
        self,
        found: list[int],
        hashes: Sequence[int],
        token_ids: TokenIds,
        root: int,
        origins: Digests | None,
    ) -> NDArray[np.bool_]:
        """[blocks] True where a block holds the tokens, parent and origin it was found for."""
        ids = np.array(found, dtype=np.intp)
        expected = token_ids[: len(found) * self._block_size].reshape(len(found), -1)
        parents = np.array([root, *hashes[: len(found) - 1]], dtype=np.uint64)
        equal: NDArray[np.bool_] = (self._tokens[ids] == expected).all(axis=1)
        equal &= self._parents[ids] == parents
        if self._origins is not None:
            wanted = NO_ORIGIN if origins is None else origins[: len(found)]
            equal &= (self._origins[ids] == wanted).all(axis=1)
        elif origins is not None:
            equal[:] = False
        return equal

    def insert(
        self,
        block_ids: NDArray[np.int32],
        hashes: Sequence[int],
        parents: NDArray[np.uint64],
        token_ids: NDArray[np.integer],
        origins: Digests | None = None,
        keys: Sequence[BlockKeys] = (),
    ) -> None:
        """Adds full blocks: row i of `token_ids` [n, block_size] is the content of block_ids[i].

        `origins` [n, 2] are None where none of them has one. `keys` are needed where changes are
        followed.
        """
        for block_id, block_hash in zip(block_ids.tolist(), hashes, strict=True):
            self._hash_of[block_id] = block_hash
            if self._block_of.setdefault(block_hash, block_id) != block_id:
                self._duplicates.setdefault(block_hash, []).append(block_id)
            self.is_cached[block_id] = 1
        index = block_ids.astype(np.intp)
        self._tokens[index] = token_ids
        self._parents[index] = parents
        if origins is not None and self._origins is None:
            self._origins = np.zeros((len(self._parents), 2), dtype=np.uint64)
        if self._origins is not None:
            self._origins[index] = NO_ORIGIN if origins is None else origins
        if self.changes is not None:
            self._note_stored(self.changes, block_ids, hashes, parents, token_ids, keys)

    def _note_stored(
        self,
        changes: CacheChanges,
        block_ids: NDArray[np.int32],
        hashes: Sequence[int],
        parents: NDArray[np.uint64],
        token_ids: NDArray[np.integer],
        keys: Sequence[BlockKeys],
    ) -> None:
        """Notes the contents that no other block has; of equal ones the first counts."""
        content = token_ids.astype(np.int32)  # a copy: rows of slots change
        rows = zip(block_ids.tolist(), hashes, parents.tolist(), content, keys, strict=True)
        for block_id, block_hash, parent, tokens, key in rows:
            if self._block_of[block_hash] == block_id:
                before = None if key.is_first else parent
                changes.add(
                    BlockStored(self.group, block_hash, before, tokens, key.texts, key.adapter_id)
                )

    def evict(self, block_id: int) -> None:
        """Forgets a block's content; another block with the same content replaces it."""
        block_hash = self._hash_of.pop(block_id, None)
        if block_hash is None:
            return
        self.is_cached[block_id] = 0
        self.num_evictions += 1
        others = self._duplicates.get(block_hash)
        if self._block_of[block_hash] != block_id:
            assert others is not None  # a hashed block is either the entry or among its duplicates
            others.remove(block_id)
        elif others:
            self._block_of[block_hash] = others.pop()
        else:
            del self._block_of[block_hash]
            if self.changes is not None:
                self.changes.add(BlockRemoved(self.group, block_hash))
        if others is not None and not others:
            del self._duplicates[block_hash]

    def clear(self) -> int:
        """Forgets all content; returns the number of blocks that had any."""
        num_forgotten = len(self._hash_of)
        self._hash_of.clear()
        self.is_cached[:] = array("B", bytes(len(self.is_cached)))
        self._block_of.clear()
        self._duplicates.clear()
        return num_forgotten
