"""Decode attention over a cache in 8-bit floats, for many rows; `decode_float8.cu` says how.

    q [B, H, 128] bfloat16, a cache as in `float8_cache`  ->  out [B, H, 128]

A context is not shared out among blocks, so few rows leave most of the chip without work: `pays`.
"""

import ctypes
import logging
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from kernels.cluster import float8_cache
from kernels.cluster.float8_cache import DIMS, Float8Cache
from kernels.cluster.program import (
    CannotCompile,
    Kernel,
    Launch,
    Program,
    can_run_on,
    num_processors,
)

SOURCE = Path(__file__).with_name("decode_float8.cu")
# Warps of a block, and how many such blocks a multiprocessor holds.
_RESIDENT = {3: 4, 4: 3}
_FEWEST_PAIRS = 768  # of a sequence and a KV head

log = logging.getLogger(__name__)


class _Attention(ctypes.Structure):
    _fields_ = (
        ("q", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("q_stride", ctypes.c_int64),
        ("cache", Float8Cache),
    )


def suits(q: Tensor, k_cache: Tensor) -> bool:
    """Whether the kernel takes these types and shapes; its device is another question."""
    return float8_cache.suits(q.dtype, q.shape[1], k_cache)


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
        num_rows, num_heads, _ = q.shape
        if not suits(q, k_cache):
            raise ValueError(f"q {list(q.shape)} and a cache {list(k_cache.shape)}")
        if q.stride()[1:] != (DIMS, 1) or q.stride(0) % 8:
            raise ValueError("heads of q must be contiguous, and tokens aligned")
        out = torch.empty_like(q) if out is None else out
        given = k_cache, v_cache, block_tables, context_lens, kv_scales
        cache = float8_cache.described(*given, num_heads, scale)
        kernel = self._kernel(num_rows * k_cache.shape[2])
        kernel(_Attention(q.data_ptr(), out.data_ptr(), q.stride(0), cache))
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
    if not can_run_on(q.device) or not suits(q, k_cache):
        return None
    return _compiled(k_cache.dtype, kept)


@lru_cache
def _compiled(dtype: torch.dtype, kept: Path | None) -> DecodeFloat8 | None:
    try:
        return DecodeFloat8(dtype, kept)
    except CannotCompile as error:
        log.warning("KV cache: a slower kernel for decode attention, %s", error)
        return None
