"""Tensor maps: what the hardware that copies a cache's tiles in bulk is told of it."""

import ctypes
from functools import lru_cache

from torch import Tensor

from kernels.cluster.float8_cache import DIMS, TILE
from kernels.cluster.program import checked


class TensorMap(ctypes.Structure):
    """The driver's CUtensorMap."""

    _fields_ = (("words", ctypes.c_uint64 * 16),)


def tensor_map(cache: Tensor, num_heads: int) -> TensorMap:
    """A map of keys or values [num_blocks, block_size, KV heads, 128] in bytes, to copy by tiles.

    A tile is 16 tokens of `num_heads` heads of a block. In shared memory it is
    [heads, tokens, 128]; of the eight 16-byte pieces of a token, piece p is at p ^ token % 8,
    counted from an address that is a multiple of 1,024.
    """
    return _map(cache.data_ptr(), tuple(cache.shape), cache.stride(), num_heads)


@lru_cache(maxsize=1024)  # two a layer
def _map(
    address: int, shape: tuple[int, ...], strides: tuple[int, ...], num_heads: int
) -> TensorMap:
    from cuda.bindings import driver  # noqa: PLC0415 - CUDA machines alone have it

    num_blocks, block_size, num_kv_heads, _ = shape
    sizes = (DIMS, block_size, num_kv_heads, num_blocks)
    steps = (strides[1], strides[2], strides[0])  # of all sizes but the first
    (made,) = checked(
        driver.cuTensorMapEncodeTiled(
            driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT8,
            len(sizes),
            address,
            [driver.cuuint64_t(size) for size in sizes],
            [driver.cuuint64_t(step) for step in steps],
            [driver.cuuint32_t(size) for size in (DIMS, TILE, num_heads, 1)],
            [driver.cuuint32_t(1)] * len(sizes),
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )
    return TensorMap.from_buffer_copy(ctypes.string_at(made.getPtr(), ctypes.sizeof(TensorMap)))
