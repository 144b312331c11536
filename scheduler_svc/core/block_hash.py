"""Chained hashes of full blocks: a block's hash names its tokens and everything before them.

A hash is xxh64 over the parent's hash (8 bytes, little-endian; absent for a first block) followed
by the block's tokens as little-endian int64. 64 bits can collide, so whoever finds a block by its
hash also compares its content (`prefix_cache`). A salt stands in for the parent of the first block,
so chains of different salts have nothing in common.
"""

from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh64_intdigest

from scheduler_svc.core.request import TokenIds

_INT64 = np.dtype("<i8")
NO_PARENT = 0  # stored for first blocks; a parent is only compared together with the tokens


def root_of(salt: str) -> int:
    """What the first block has in place of a parent; NO_PARENT without a salt."""
    if not salt:
        return NO_PARENT
    return int.from_bytes(blake2b(salt.encode(), digest_size=8).digest(), "little")


def chain(token_ids: TokenIds, block_size: int, parent: int | None = None) -> list[int]:
    """Hashes of the full blocks of `token_ids`, which begin right after the block `parent`."""
    num_blocks = len(token_ids) // block_size
    content = token_ids[: num_blocks * block_size].astype(_INT64).tobytes()
    stride = block_size * _INT64.itemsize
    hashes = []
    for start in range(0, num_blocks * stride, stride):
        block = content[start : start + stride]
        prefix = b"" if parent is None else parent.to_bytes(8, "little")
        parent = xxh64_intdigest(prefix + block)
        hashes.append(parent)
    return hashes


def extend(parents: NDArray[np.uint64], token_ids: NDArray[np.integer]) -> list[int]:
    """Hashes of one block each: row i of token_ids [n, block_size] follows the block parents[i]."""
    num_rows, block_size = token_ids.shape
    rows = np.empty((num_rows, 1 + block_size), dtype=_INT64)
    rows[:, 0] = parents.view(_INT64)
    rows[:, 1:] = token_ids
    content = rows.tobytes()
    stride = (1 + block_size) * _INT64.itemsize
    return [
        xxh64_intdigest(content[start : start + stride])
        for start in range(0, num_rows * stride, stride)
    ]
