"""Full blocks in a row of one sequence, by content, as tiers and transfers name them."""

from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from scheduler_svc.core.request.identity import Digests
from scheduler_svc.core.request.request import TokenIds
from scheduler_svc.core.request.sequence import Sequence

_CHECK_BYTES = 8
BlockIds = list[int]
Keys = NDArray[np.uint64]  # [n, 2] hash and check of each block


@dataclass(frozen=True, slots=True)
class Chain:
    """The contents of blocks, each the parent of the next."""

    hashes: list[int]
    parent: int  # hash of what the first block follows: a block, or the root
    token_ids: TokenIds  # [blocks * block_size]
    origins: Digests | None  # [blocks, 2]; None: no block has one

    @classmethod
    def of(cls, sequence: Sequence, begin: int, end: int, block_size: int) -> "Chain":
        """The blocks from `begin` up to (not including) `end` of a sequence's known tokens."""
        hashes = sequence.block_hashes(block_size)
        origins = sequence.origins
        return cls(
            hashes[begin:end],
            hashes[begin - 1] if begin else sequence.root,
            sequence.token_ids[begin * block_size : end * block_size],
            None if origins is None else origins.of_blocks(begin, end, block_size),
        )

    def __len__(self) -> int:
        return len(self.hashes)

    @property
    def parents(self) -> NDArray[np.uint64]:
        """[blocks] hash of what each block follows."""
        return np.array([self.parent, *self.hashes[:-1]], dtype=np.uint64)

    @property
    def rows(self) -> TokenIds:
        """[blocks, block_size] the tokens of each block."""
        return self.token_ids.reshape(len(self), -1)

    @property
    def contents(self) -> list[bytes]:
        """Bytes that tell each block from all others: its parent's hash, its origin, its tokens."""
        origins = [b""] * len(self) if self.origins is None else map(bytes, self.origins)
        tokens = map(bytes, self.rows.astype("<i4"))
        parents = map(bytes, self.parents[:, None])
        return list(map(b"".join, zip(parents, origins, tokens, strict=True)))

    @property
    def keys(self) -> Keys:
        """[blocks, 2] by which a tier names each block: its hash, and a check of its content.

        Both together tell the block's tokens, origin and parent from all others.
        """
        found = np.zeros((len(self), 2), dtype=np.uint64)
        found[:, 0] = self.hashes
        for index, content in enumerate(self.contents):
            digest = blake2b(content, digest_size=_CHECK_BYTES).digest()
            found[index, 1] = int.from_bytes(digest, "little")
        return found

    def part(self, begin: int, end: int) -> "Chain":
        """The blocks from `begin` up to (not including) `end`."""
        size = len(self.token_ids) // len(self) if len(self) else 0
        return Chain(
            self.hashes[begin:end],
            self.hashes[begin - 1] if begin else self.parent,
            self.token_ids[begin * size : end * size],
            None if self.origins is None else self.origins[begin:end],
        )
