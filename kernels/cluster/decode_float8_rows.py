"""From the projection of few rows to what they attended to, over a cache in 8-bit floats.

    qkv [B, (H + 2 Hkv) 128] bfloat16, positions [B], slot_mapping [B], a cache as in
    `float8_cache`  ->  out [B, H, 128], and k_cache, v_cache in place

What `kernels.attention.rope` and decode attention do one after the other, in one launch;
`decode_float8_rows.cu` says how. Numbers that are stored are the same.
"""

import ctypes
import logging
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from kernels import fp8
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

SOURCE = Path(__file__).with_name("decode_float8_rows.cu")
_WARPS = 8  # of a block
# Blocks that share a pair, at most: more of them begin later, and read a long context sooner.
_LARGEST_CLUSTER, _LARGEST_FOR_SHORT = 16, 8
_SHORT = 4096  # tokens
_MOST_PAIRS = 384  # of a row and a KV head

log = logging.getLogger(__name__)


class _Rows(ctypes.Structure):
    _fields_ = (
        ("qkv", ctypes.c_void_p),
        ("q_norm", ctypes.c_void_p),
        ("k_norm", ctypes.c_void_p),
        ("cos_sin", ctypes.c_void_p),
        ("key_offsets", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("qkv_stride", ctypes.c_int64),
        ("cache", Float8Cache),
        ("eps", ctypes.c_float),
    )


def pays(num_rows: int, num_kv_heads: int) -> bool:
    """True if so few rows are quicker this way; measured on H200."""
    return num_rows * num_kv_heads <= _MOST_PAIRS


class DecodeFloat8Rows:
    """The kernels for caches of one type and groups of one size, on the current device."""

    def __init__(
        self,
        dtype: torch.dtype,
        group: int,
        has_qk_norm: bool,
        is_short: bool,
        kept: Path | None = None,
    ) -> None:
        """`is_short`: no context has more than a few thousand tokens.

        What is compiled is kept in a folder for the next start.
        """
        self._group = group
        self._largest = _LARGEST_FOR_SHORT if is_short else _LARGEST_CLUSTER
        self._defines = {
            "WARPS": _WARPS, "GROUP": group, "IS_E5M2": int(dtype == torch.float8_e5m2),
            "QK_NORM": int(has_qk_norm),
        }  # fmt: skip
        self._kept = kept
        self._processors = num_processors()
        self._programs: dict[int, Program] = {}  # by blocks of a cluster
        self._kernels: dict[int, Kernel] = {}  # by pairs

    def attend(
        self,
        qkv: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        cos_sin: Tensor,
        qk_norms: tuple[Tensor, Tensor] | None,
        eps: float,
        k_cache: Tensor,
        v_cache: Tensor,
        block_tables: Tensor,
        context_lens: Tensor,
        scale: float,
        kv_scales: Tensor,
        key_offsets: Tensor | None = None,
    ) -> Tensor:
        """Attends with `context_lens[b]` tokens, of which the row itself is the last.

        A row of length 0 is padding and gives zeros; one with a negative slot is not stored.
        """
        num_rows, num_kv_heads = len(qkv), k_cache.shape[2]
        num_heads = _num_heads(qkv, k_cache)
        if num_heads != self._group * num_kv_heads or not _suits(qkv, k_cache):
            raise ValueError(f"qkv {list(qkv.shape)} and a cache {list(k_cache.shape)}")
        if qkv.stride(1) != 1 or cos_sin.dtype != torch.float32 or not cos_sin.is_contiguous():
            raise ValueError("rows of qkv and the float32 table of rotations must be contiguous")
        if not positions.dtype == slot_mapping.dtype == torch.int64:
            raise TypeError("positions and slot_mapping must be int64")
        fp8.check_offsets(key_offsets, k_cache.dtype, num_kv_heads, DIMS)
        out = qkv.new_empty((num_rows, num_heads, DIMS))
        given = k_cache, v_cache, block_tables, context_lens, kv_scales
        cache = float8_cache.described(*given, num_heads, scale)
        q_norm, k_norm = qk_norms or (None, None)
        tensors = qkv, q_norm, k_norm, cos_sin, key_offsets, positions, slot_mapping, out
        addresses = (None if tensor is None else tensor.data_ptr() for tensor in tensors)
        self._kernel(num_rows * num_kv_heads)(_Rows(*addresses, qkv.stride(0), cache, eps))
        return out

    def prepare(self, num_rows: int, num_kv_heads: int) -> None:
        """Compiles the kernel for so many rows. Raises CannotCompile."""
        self._kernel(num_rows * num_kv_heads)

    def _kernel(self, pairs: int) -> Kernel:
        if pairs not in self._kernels:
            cluster = cluster_for(pairs, self._processors, self._largest)
            if cluster not in self._programs:
                defines = {**self._defines, "CLUSTER": cluster}
                self._programs[cluster] = Program(SOURCE, defines, self._kept)
            launch = Launch(pairs * cluster, cluster, _WARPS * 32)
            self._kernels[pairs] = self._programs[cluster].kernel("attend", launch)
        return self._kernels[pairs]


def cluster_for(pairs: int, num_processors: int, largest: int) -> int:
    """Blocks that share a pair: in all about one for a multiprocessor."""
    if pairs > num_processors:
        return 1
    most = max(2, min(largest, num_processors // pairs))
    return 1 << (most.bit_length() - 1)


def _num_heads(qkv: Tensor, k_cache: Tensor) -> int:
    """Number of query heads."""
    num_kv_heads, head_dim = k_cache.shape[2:]
    return qkv.shape[1] // head_dim - 2 * num_kv_heads


def _suits(qkv: Tensor, k_cache: Tensor) -> bool:
    num_heads = _num_heads(qkv, k_cache)
    return num_heads > 0 and float8_cache.suits(qkv.dtype, num_heads, k_cache)


def kernels_for(
    qkv: Tensor,
    k_cache: Tensor,
    has_qk_norm: bool,
    most_tokens: int,
    kept: Path | None = None,
) -> DecodeFloat8Rows | None:
    """The kernels for these tensors; None: their device, types or shapes have none.

    A context has at most so many tokens, which all steps of a model must give alike: rows are
    added in another order by larger clusters.
    """
    if not can_run_on(qkv.device) or not _suits(qkv, k_cache):
        return None
    num_kv_heads = k_cache.shape[2]
    group = _num_heads(qkv, k_cache) // num_kv_heads
    kernels = _of(k_cache.dtype, group, has_qk_norm, most_tokens <= _SHORT, kept)
    return _prepared(kernels, len(qkv), num_kv_heads)


@lru_cache
def _prepared(
    kernels: DecodeFloat8Rows, num_rows: int, num_kv_heads: int
) -> DecodeFloat8Rows | None:
    try:
        kernels.prepare(num_rows, num_kv_heads)
    except CannotCompile as error:
        log.warning("KV cache: two kernels for one, %s", error)
        return None
    return kernels


@lru_cache
def _of(
    dtype: torch.dtype, group: int, has_qk_norm: bool, is_short: bool, kept: Path | None
) -> DecodeFloat8Rows:
    return DecodeFloat8Rows(dtype, group, has_qk_norm, is_short, kept)
