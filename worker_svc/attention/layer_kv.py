"""The keys and values of one layer, as caches of all kinds hand them out."""

from dataclasses import dataclass

from torch import Tensor

from kernels.reference import KvRows, LatentRows


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """The place of one layer's keys and values in the blocks of its KV group."""

    group: int
    block_size: int  # tokens in a block
    first: int  # number of a block at which they begin
    rows_per_block: int  # from a row of one block to the same row of the next, in `rows`

    def rows_of(self, kv_slots: Tensor) -> Tensor:
        """The rows of `rows` that KV slots of the group are."""
        if self.rows_per_block == self.block_size:
            return kv_slots
        blocks = kv_slots.div(self.block_size, rounding_mode="floor")
        return kv_slots + blocks * (self.rows_per_block - self.block_size)


@dataclass(frozen=True, slots=True)
class LayerKv:
    """The keys and values of one layer, in all forms in which they are read."""

    k: Tensor  # [num_blocks, block_size, Hkv, D]
    v: Tensor  # the same of Dv
    # By row: [num_rows, 2, Hkv, D], or where sizes differ both apart, or keys that hold the values.
    rows: Tensor | KvRows | LatentRows
    k_rows: Tensor  # [num_rows, Hkv, D]
    v_rows: Tensor  # [num_rows, Hkv, Dv]
    scales: Tensor | None = None  # [4, Hkv] float32, of a cache in FP8 (`kernels.fp8`)
    # [Hkv, D] float32, of a cache in FP8: the part of keys that is not stored.
    key_offsets: Tensor | None = None
    place: LayerPlace | None = None  # in a KV group's blocks; None: rows are KV slots

    @classmethod
    def of(
        cls,
        rows: Tensor,
        block_size: int,
        scales: Tensor | None = None,
        key_offsets: Tensor | None = None,
    ) -> "LayerKv":
        """Returns a layer's keys and values [num_slots, 2, Hkv, D], which have one size."""
        k_rows, v_rows = rows.unbind(1)
        k, v = rows.view(-1, block_size, *rows.shape[1:]).unbind(2)
        return cls(k, v, rows, k_rows, v_rows, scales, key_offsets)

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self.k.shape[1]

    @property
    def group(self) -> int:
        """The layer's KV group."""
        return 0 if self.place is None else self.place.group

    @property
    def rows_per_block(self) -> int:
        """The distance from a row of one block to the same row of the next."""
        return self.block_size if self.place is None else self.place.rows_per_block

    def rows_of(self, kv_slots: Tensor) -> Tensor:
        """The rows of `rows` that KV slots of the layer's group are."""
        return kv_slots if self.place is None else self.place.rows_of(kv_slots)
