"""Chained hashes of full blocks: a block's hash identifies its tokens and all tokens before them.

A hash is xxh64 over the parent's hash (8 bytes, little-endian; absent for a first block) followed
by the block's tokens as little-endian int64. 64 bits can collide, so every lookup also compares the
content (`prefix_cache`). Where a picture lies in or reaches into a block, its place and content id
follow the tokens (`request.Extra`). The hash of the root (`identity.Root`) replaces the parent of
the first block, so chains of different salts, cache types, weights or adapters share no hashes.
"""

from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh64_intdigest

from scheduler_svc.core.request.request import Extras, TokenIds

_INT64 = np.dtype("<i8")
_OF_MORE = b"root"  # keeps the hashes of fuller roots apart from those of salt and namespace alone
NO_PARENT = 0  # parent stored for first blocks; parents are compared only together with tokens


def root_of(salt: str, namespace: str = "", weights_version: str = "", adapter_id: str = "") -> int:
    """The parent hash of a first block; NO_PARENT when all texts are empty.

    The namespace, 16 bytes at most, tells blocks apart whose tokens do not tell their content.
    """
    if not (salt or namespace or weights_version or adapter_id):
        return NO_PARENT
    person = namespace.encode()
    if not (weights_version or adapter_id):
        hashed = blake2b(salt.encode(), digest_size=8, person=person)
    else:
        hashed = blake2b(digest_size=8, person=person, salt=_OF_MORE)
        for text in (salt, weights_version, adapter_id):
            encoded = text.encode()
            hashed.update(len(encoded).to_bytes(4, "little") + encoded)
    return int.from_bytes(hashed.digest(), "little")


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


def chain_with(
    extras: Extras, position: int, token_ids: TokenIds, block_size: int, parent: int | None = None
) -> list[int]:
    """As `chain`, for tokens from `position` on, among which there are pictures."""
    hashes = []
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        begin = position + start
        content = b"" if parent is None else parent.to_bytes(8, "little")
        content += token_ids[start : start + block_size].astype(_INT64).tobytes()
        for extra in extras:
            if extra.begin < begin + block_size and begin < extra.end:
                content += extra.to_bytes()
        parent = xxh64_intdigest(content)
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
