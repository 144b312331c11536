"""A 64-bit hash of a slot's state, computed by scheduler and worker alike.

    table = sum over the block table of block_id * weight(position)          (mod 2**64)
    hash  = mix(table + mix(slot + 1) + mix(num_computed) * 3 + mix(token + 1) * 5)

The weights are odd, so a table with one different entry has another sum, and a sum can be updated
as blocks are appended. `token` is the last one that was computed.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from wire.columns import INT32, UINT64, BadColumn, unpack

Hashes = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class StateHashes:
    """The hash of each live slot, in ascending order of slots."""

    slots: NDArray[np.integer]
    hashes: Hashes

    def pack(self) -> dict[str, bytes]:
        """The two columns of the message."""
        return {
            "slots": self.slots.astype(INT32).tobytes(),
            "hashes": self.hashes.astype(UINT64).tobytes(),
        }

    @classmethod
    def unpack(cls, slots: bytes, hashes: bytes) -> "StateHashes":
        """The hashes of a message. Raises BadColumn unless there is one hash per slot."""
        found = unpack(slots, name="state.slots")
        if len(hashes) != len(found) * UINT64.itemsize:
            raise BadColumn(f"state.hashes: {len(hashes)} bytes for {len(found)} slots")
        return cls(found, np.frombuffer(hashes, dtype=UINT64))


def block_weights(num_blocks: int) -> Hashes:
    """The weight of each position in a block table."""
    return mix(np.arange(1, num_blocks + 1, dtype=np.uint64)) | np.uint64(1)


def table_sums(block_tables: NDArray[np.integer], weights: Hashes) -> Hashes:
    """The sums of tables [N, W], which are padded with 0."""
    sums: Hashes = block_tables.astype(np.uint64) @ weights[: block_tables.shape[1]]
    return sums


def slot_hashes(
    slots: NDArray[np.integer],
    tables: Hashes,
    num_computed: NDArray[np.integer],
    token_ids: NDArray[np.integer],
) -> Hashes:
    """The hash of each slot, from its table's sum, its computed tokens and the last one."""
    parts = mix(slots.astype(np.uint64) + np.uint64(1))
    parts = parts + mix(num_computed.astype(np.uint64)) * np.uint64(3)
    parts = parts + mix(token_ids.astype(np.uint64) + np.uint64(1)) * np.uint64(5)
    return mix(tables + parts)


def mix(values: Hashes) -> Hashes:
    """A bijection that mixes 64 bits (splitmix64)."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
