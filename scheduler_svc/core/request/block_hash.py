"""Chained hashes of full blocks: a block's hash identifies its tokens and all tokens before them.

A hash is xxh64 over the parent's hash (8 bytes, little-endian; absent for a first block) followed
by the block's tokens as little-endian int64. 64 bits can collide, so every lookup also compares the
content (`prefix_cache`). A salt, and the type of a KV cache in FP8, replace the parent of the first
block, so chains of different salts or types share no hashes.
"""

from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh64_intdigest

from scheduler_svc.core.request.request import TokenIds

_INT64 = np.dtype("<i8")
NO_PARENT = 0  # parent stored for first blocks; parents are compared only together with tokens


def root_of(salt: str, namespace: str = "") -> int:
    """The parent hash of a first block: of salt and namespace, NO_PARENT without either.

    The namespace, 16 bytes at most, tells blocks apart whose tokens do not tell their content.
    """
    if not salt and not namespace:
        return NO_PARENT
    person = namespace.encode()
    return int.from_bytes(blake2b(salt.encode(), digest_size=8, person=person).digest(), "little")


def chain(token_ids: TokenIds, block_size: int, parent: int | None = None) -> list[int]:
    """Hashes of the full blocks of `token_ids`, which follow the block with hash `parent`."""
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
    """One hash per row: row i of token_ids [n, block_size] is the block after parents[i]."""
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
