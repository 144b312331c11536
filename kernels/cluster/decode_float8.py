"""Decode attention over a cache in 8-bit floats, for many rows; `decode_float8.cu` says how.

    q [B, H, 128] bfloat16, a cache as in `float8_cache`  ->  out [B, H, 128]

How contexts are shared out among blocks depends on the lengths of all rows, and with it the order
in which a row is added.
"""

import ctypes
import logging
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

import torch
from torch import Tensor

from kernels.cluster import float8_cache
from kernels.cluster.float8_cache import DIMS, TILE, Float8Cache
from kernels.cluster.program import (
    CannotCompile,
    Kernel,
    Launch,
    Program,
    can_run_on,
    num_processors,
)
from kernels.cluster.tensor_map import TensorMap, tensor_map

SOURCE = Path(__file__).with_name("decode_float8.cu")
NEWEST = 64  # tokens of a sequence, at most, that a step of the model writes before it attends
_FEWEST_PAIRS = 256  # of a sequence and a KV head
_WARPS = 8  # of a block that attend, at most
_SHARED_BYTES, _MOST_STAGES = 208 << 10, 8
MOST_UNITS = 2048  # of a sequence and the KV heads of a block
_PART_BYTES = 32 * (1 + DIMS // 16) * 16  # of what a warp leaves for another

log = logging.getLogger(__name__)


class _Attention(ctypes.Structure):
    _fields_ = (
        ("keys", TensorMap),
        ("values", TensorMap),
        ("q", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("parts", ctypes.c_void_p),
        ("arrived", ctypes.c_void_p),
        ("q_stride", ctypes.c_int64),
        ("num_rows", ctypes.c_int),
        ("cache", Float8Cache),
    )


def suits(q: Tensor, k_cache: Tensor) -> bool:
    """True if the kernel takes these types and shapes; its device is another question."""
    return float8_cache.suits(q.dtype, q.shape[1], k_cache)


def pays(num_rows: int, num_kv_heads: int) -> bool:
    """True if so many rows are quicker this way, measured on H200, and are not too many for it."""
    num_units = num_rows * num_kv_heads // block_shape(num_kv_heads).kv_heads
    return num_rows * num_kv_heads >= _FEWEST_PAIRS and num_units <= MOST_UNITS


class DecodeFloat8:
    """The kernel for caches of one type and number of heads, on the current device."""

    def __init__(self, dtype: torch.dtype, num_kv_heads: int, kept: Path | None = None) -> None:
        """Compiles, or reads what an earlier start compiled, in a folder. Raises CannotCompile."""
        self._shape = shape = block_shape(num_kv_heads)
        self._num_kv_heads = num_kv_heads
        defines = {
            "KV_HEADS": shape.kv_heads,
            "SPANS": shape.spans,
            "STAGES": shape.stages,
            "NEWEST": NEWEST,
            "IS_E5M2": int(dtype == torch.float8_e5m2),
        }
        self._program = Program(SOURCE, defines, kept)
        self._blocks = num_processors()
        self._kernels: dict[int, Kernel] = {}  # by number of units
        self._kernel(MOST_UNITS)  # some devices have not as much shared memory
        # Used by all launches, which follow one another.
        num_parts = self._blocks * 2 * shape.kv_heads
        self._parts = torch.empty(num_parts * _PART_BYTES, dtype=torch.uint8, device="cuda")
        self._arrived = torch.zeros(MOST_UNITS * _WARPS, dtype=torch.int32, device="cuda")

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
        (num_rows, num_heads, _), num_kv_heads = q.shape, k_cache.shape[2]
        if not suits(q, k_cache) or num_kv_heads != self._num_kv_heads:
            raise ValueError(f"q {list(q.shape)} and a cache {list(k_cache.shape)}")
        if k_cache.stride(2) != DIMS:
            raise ValueError("heads of a token must be contiguous in the cache")
        if q.stride()[1:] != (DIMS, 1) or q.stride(0) % 8:
            raise ValueError("heads of q must be contiguous, and tokens aligned")
        out = torch.empty_like(q) if out is None else out
        given = k_cache, v_cache, block_tables, context_lens, kv_scales
        cache = float8_cache.described(*given, num_heads, scale)
        addresses = (x.data_ptr() for x in (q, out, self._parts, self._arrived))
        kernel = self._kernel(num_rows * num_kv_heads // self._shape.kv_heads)
        maps = (tensor_map(x, self._shape.kv_heads) for x in (k_cache, v_cache))
        kernel(_Attention(*maps, *addresses, q.stride(0), num_rows, cache))
        return out

    def _kernel(self, num_units: int) -> Kernel:
        if num_units not in self._kernels:
            if num_units > MOST_UNITS:
                raise ValueError(f"{num_units} rows, or parts of their heads: {MOST_UNITS} at most")
            shape = self._shape
            shared = shape.shared_bytes + (2 * num_units + 1) * 4
            launch = Launch(self._blocks, 1, 32 * (shape.warps + 1), shared)
            self._kernels[num_units] = self._program.kernel("attend", launch)
        return self._kernels[num_units]


@dataclass(frozen=True, slots=True)
class BlockShape:
    """The shape of a block of the kernel."""

    kv_heads: int
    spans: int  # tiles of a step
    stages: int  # steps of its ring

    @property
    def warps(self) -> int:
        """Warps that attend."""
        return self.kv_heads * self.spans

    @property
    def shared_bytes(self) -> int:
        """Bytes of the ring, and of what warps leave for each other."""
        step = self.spans * 2 * self.kv_heads * TILE * DIMS
        return self.stages * step + (self.spans - 1) * self.kv_heads * _PART_BYTES


@cache
def block_shape(num_kv_heads: int) -> BlockShape:
    """As many heads as share them all out evenly, and as many tiles as there are warps for."""
    kv_heads = next(n for n in range(_WARPS, 0, -1) if num_kv_heads % n == 0)
    shapes = (BlockShape(kv_heads, _WARPS // kv_heads, n) for n in range(_MOST_STAGES, 0, -1))
    return next(shape for shape in shapes if shape.shared_bytes <= _SHARED_BYTES)


def kernel_for(q: Tensor, k_cache: Tensor, kept: Path | None = None) -> DecodeFloat8 | None:
    """The kernel for these tensors; None: their device, types or shapes have none."""
    if not can_run_on(q.device) or not suits(q, k_cache):
        return None
    return _compiled(k_cache.dtype, k_cache.shape[2], kept)


@lru_cache
def _compiled(dtype: torch.dtype, num_kv_heads: int, kept: Path | None) -> DecodeFloat8 | None:
    try:
        return DecodeFloat8(dtype, num_kv_heads, kept)
    except CannotCompile as error:
        log.warning("KV cache: a slower kernel for decode attention, %s", error)
        return None
