"""Decode attention over a cache in 8-bit floats, for many rows; `decode_float8.cu` says how.

    q [B, H, 128] bfloat16, k_cache and v_cache [num_blocks, block_size, Hkv, 128] e4m3 or e5m2,
    block_tables [B, W], context_lens [B], kv_scales [4, Hkv] (`kernels.fp8`)  ->  out [B, H, 128]

A context is not shared out among blocks, so few rows leave most of the chip without work: `pays`.
"""

import ctypes
import logging
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from kernels import fp8
from kernels.cluster.program import CannotCompile, Kernel, Launch, Program, num_processors

SOURCE = Path(__file__).with_name("decode_float8.cu")
# Warps of a block, and how many such blocks a multiprocessor holds.
_RESIDENT = {3: 4, 4: 3}
_DIMS = 128
_MOST_HEADS = 8  # of queries that share a KV head
_TILE = 16  # tokens
_FEWEST_PAIRS = 768  # of a sequence and a KV head
_LOG2_E = 1.4426950408889634
_MIN_CAPABILITY = (9, 0)

log = logging.getLogger(__name__)


class _Attention(ctypes.Structure):
    _fields_ = (
        ("q", ctypes.c_void_p),
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("tables", ctypes.c_void_p),
        ("lengths", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("q_stride", ctypes.c_int64),
        ("block_stride", ctypes.c_int64),
        ("table_stride", ctypes.c_int64),
        ("token_stride", ctypes.c_int),
        ("head_stride", ctypes.c_int),
        ("num_kv_heads", ctypes.c_int),
        ("group", ctypes.c_int),
        ("block_bits", ctypes.c_int),
        ("scale_log2", ctypes.c_float),
    )


def suits(q: Tensor, k_cache: Tensor) -> bool:
    """Whether the kernel takes these types and shapes; its device is another question."""
    block_size, num_kv_heads, head_dim = k_cache.shape[1:]
    is_power = block_size & (block_size - 1) == 0
    return (
        q.dtype == torch.bfloat16
        and fp8.is_fp8(k_cache.dtype)
        and head_dim == _DIMS
        and q.shape[1] // num_kv_heads <= _MOST_HEADS
        and is_power
        and block_size >= _TILE
    )


def pays(num_rows: int, num_kv_heads: int) -> bool:
    """Whether so many rows fill the chip; measured on H200."""
    return num_rows * num_kv_heads >= _FEWEST_PAIRS


class DecodeFloat8:
    """The kernel for caches of one type, on the current device."""

    def __init__(self, dtype: torch.dtype, kept: Path | None = None) -> None:
        """What is compiled is kept in a folder for the next start. Raises CannotCompile."""
        is_e5m2 = int(dtype == torch.float8_e5m2)
        self._programs = {
            warps: Program(SOURCE, {"WARPS": warps, "IS_E5M2": is_e5m2}, kept)
            for warps in _RESIDENT
        }
        self._processors = num_processors()
        self._kernels: dict[int, Kernel] = {}  # by number of blocks

    def attend(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_tables: Tensor,
        context_lens: Tensor,
        scale: float,
        kv_scales: Tensor,
        out: Tensor | None = None,
    ) -> Tensor:
        """Attends to the first `context_lens[b]` cached tokens; a row of length 0 gives zeros."""
        num_rows, num_heads, head_dim = q.shape
        block_size, num_kv_heads = k_cache.shape[1:3]
        if not suits(q, k_cache) or k_cache.stride() != v_cache.stride():
            raise ValueError(f"q {list(q.shape)} and a cache {list(k_cache.shape)}")
        if not block_tables.dtype == context_lens.dtype == torch.int32:
            raise TypeError("block_tables and context_lens must be int32")
        if q.stride()[1:] != (head_dim, 1) or q.stride(0) % 8 or k_cache.stride(1) % 16:
            raise ValueError("heads of q must be contiguous, and tokens aligned")
        out = torch.empty_like(q) if out is None else out
        strides = k_cache.stride()
        self._kernel(num_rows * num_kv_heads)(
            _Attention(
                q.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), block_tables.data_ptr(),
                context_lens.data_ptr(), kv_scales.data_ptr(), out.data_ptr(),
                q.stride(0), strides[0], block_tables.stride(0), strides[1], strides[2],
                num_kv_heads, num_heads // num_kv_heads, block_size.bit_length() - 1,
                scale * _LOG2_E,
            )
        )  # fmt: skip
        return out

    def _kernel(self, num_blocks: int) -> Kernel:
        if num_blocks not in self._kernels:
            warps = warps_for(num_blocks, self._processors)
            launch = Launch(num_blocks, 1, warps * 32)
            self._kernels[num_blocks] = self._programs[warps].kernel("attend", launch)
        return self._kernels[num_blocks]


def warps_for(num_blocks: int, num_processors: int) -> int:
    """Warps of a block: as leave fewest places empty when the last blocks run."""

    def places(warps: int) -> int:
        at_once = _RESIDENT[warps] * num_processors
        return -(-num_blocks // at_once) * at_once

    return min(_RESIDENT, key=places)


def kernel_for(q: Tensor, k_cache: Tensor, kept: Path | None = None) -> DecodeFloat8 | None:
    """The kernel for these tensors; None: their device, types or shapes have none."""
    if not q.is_cuda or not suits(q, k_cache):
        return None
    if torch.cuda.get_device_capability(q.device) < _MIN_CAPABILITY:
        return None
    return _compiled(k_cache.dtype, kept)


@lru_cache
def _compiled(dtype: torch.dtype, kept: Path | None) -> DecodeFloat8 | None:
    try:
        return DecodeFloat8(dtype, kept)
    except CannotCompile as error:
        log.warning("KV cache: a slower kernel for decode attention, %s", error)
        return None
