"""GEMMs by cuBLASLt with an algorithm chosen by the caller.

    x [T, K], weight [N, K], out [T, N]:  out = x @ weight.T, or out += x @ weight.T

Uses the cuBLASLt that torch has loaded. torch takes the first algorithm of the library's heuristic;
here the caller times several and chooses: all that the heuristic returns, or its first ones and
those with tiles that fit (`cublas_tiles`). Sums are float32, also across slices of K, and rounded
once.
"""

import ctypes
import weakref
from ctypes import (
    byref,
    c_char_p,
    c_float,
    c_int,
    c_int64,
    c_size_t,
    c_uint16,
    c_uint32,
    c_uint64,
    c_void_p,
)
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kernels.gemm.cublas_tiles import Tiling, fitting

# Constants of cublasLt.h.
_DATA_TYPES = {torch.float16: 2, torch.bfloat16: 14}
_COMPUTE_32F, _SCALE_32F = 68, 0
_DESC_TRANSA, _OP_T = 3, 1
_PREFERENCE_MAX_WORKSPACE_BYTES, _PREFERENCE_REDUCTION_SCHEME_MASK = 1, 3
_REDUCTION_NONE, _REDUCTION_COMPUTE_TYPE = 0, 2
_CONFIG_TILE, _CONFIG_SPLITS, _CONFIG_REDUCTION = 1, 2, 3
_CONFIG_OPTION, _CONFIG_CLUSTER = 5, 8

WORKSPACE_BYTES = 32 << 20
ALIGNMENT = 256  # bytes; the heuristic assumes it for all tensors
_MAX_NAMED = 32
_TRIED_MAJOR = 13
_FEW_NAMED = 2  # candidates of the heuristic, if tiles are tried too
_Algorithm = c_uint64 * 8


class CublasError(RuntimeError):
    """A call of the library failed, or an algorithm cannot be used."""


@dataclass(frozen=True, slots=True)
class GemmKind:
    """GEMMs with a weight [N, K] and inputs of its dtype."""

    n: int
    k: int
    dtype: torch.dtype
    adds: bool  # out += instead of out =


@dataclass(frozen=True, slots=True)
class GemmShape:
    """A kind of GEMM with a number of rows."""

    rows: int
    kind: GemmKind


def serves(dtype: torch.dtype) -> bool:
    """True if GEMMs of this dtype are available here."""
    return dtype in _DATA_TYPES


class CublasLt:
    """The library on one device. GEMMs share a workspace: run one at a time, on one stream."""

    def __init__(self, library: ctypes.CDLL, device: torch.device) -> None:
        self._library = _Library(library)
        self._handle = self._library.create("cublasLtCreate", "cublasLtDestroy")
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        properties = torch.cuda.get_device_properties(device)
        self._num_multiprocessors = int(properties.multi_processor_count)
        # Tile options are undocumented bits, verified for this architecture and version only.
        self._has_tiles = properties.major == 9 and self.version // 10_000 == _TRIED_MAJOR

    @property
    def version(self) -> int:
        return self._library.version

    def candidates(self, shape: GemmShape) -> list[bytes]:
        """Algorithms that can compute this GEMM, the library's own choice first."""
        problem = _Problem(self._library, shape)
        named = self._named(problem)
        fitted = self._fitted(problem, named[0]) if self._has_tiles and named else []
        return list(dict.fromkeys([*named[:_FEW_NAMED], *fitted])) if fitted else named

    def gemm(self, shape: GemmShape, algorithm: bytes) -> "LibraryGemm":
        """The GEMM by an algorithm from `candidates`, possibly of another process.

        Raises CublasError for an algorithm that cannot be used here.
        """
        if len(algorithm) != ctypes.sizeof(_Algorithm):
            raise CublasError(f"an algorithm of {len(algorithm)} bytes, not 64")
        problem, known = _Problem(self._library, shape), _Algorithm.from_buffer_copy(algorithm)
        self._check(problem, known)
        return LibraryGemm(self._library, self._handle, problem, known, self._workspace)

    def _named(self, problem: "_Problem") -> list[bytes]:
        """Algorithms returned by the library's heuristic."""
        preference = _preference(self._library)
        found, count = (_Heuristic * _MAX_NAMED)(), c_int()
        self._library.call(
            "cublasLtMatmulAlgoGetHeuristic", self._handle.pointer, *problem.pointers,
            preference.pointer, _MAX_NAMED, found, byref(count),
        )  # fmt: skip
        return [bytes(one.algorithm) for one in found[: count.value] if one.state == 0]

    def _fitted(self, problem: "_Problem", named: bytes) -> list[bytes]:
        """The algorithm `named` with tiles that fit, as far as the library has them."""
        rows, n = problem.shape.rows, problem.shape.kind.n
        found = []
        for tiling in fitting(rows, n, self._num_multiprocessors):
            try:
                algorithm = self._tiled(named, tiling)
                self._check(problem, algorithm)
            except CublasError:
                continue
            found.append(bytes(algorithm))
        return found

    def _tiled(self, named: bytes, tiling: Tiling) -> "ctypes.Array[c_uint64]":
        algorithm = _Algorithm.from_buffer_copy(named)
        for attribute, value in (
            (_CONFIG_TILE, c_uint32(tiling.tile)),
            (_CONFIG_SPLITS, c_int(1)),
            (_CONFIG_REDUCTION, c_uint32(_REDUCTION_NONE)),
            (_CONFIG_OPTION, c_uint32(tiling.option)),
            (_CONFIG_CLUSTER, c_uint16(tiling.cluster)),
        ):
            self._library.call(
                "cublasLtMatmulAlgoConfigSetAttribute", byref(algorithm), attribute, byref(value),
                c_size_t(ctypes.sizeof(value)),
            )  # fmt: skip
        return algorithm

    def _check(self, problem: "_Problem", algorithm: "ctypes.Array[c_uint64]") -> None:
        """Raises CublasError for an algorithm that cannot be used."""
        checked = _Heuristic()
        self._library.call(
            "cublasLtMatmulAlgoCheck", self._handle.pointer, *problem.pointers, byref(algorithm),
            byref(checked),
        )  # fmt: skip
        if checked.workspace_bytes > WORKSPACE_BYTES:
            raise CublasError(
                f"the algorithm needs a workspace of {checked.workspace_bytes} bytes, this one "
                f"has {WORKSPACE_BYTES}"
            )


class LibraryGemm:
    """One GEMM shape with one algorithm; can be called with any weight of the shape."""

    def __init__(
        self,
        library: "_Library",
        handle: "_Owned",
        problem: "_Problem",
        algorithm: "ctypes.Array[c_uint64]",
        workspace: Tensor,
    ) -> None:
        self.shape = problem.shape
        self._library = library
        self._handle = handle
        self._problem = problem
        self._algorithm = algorithm
        self._workspace = workspace
        self._one, self._beta = c_float(1), c_float(self.shape.kind.adds)

    def __call__(self, x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
        """out = x [T, K] @ weight [N, K].T, or +=; returns out [T, N].

        All tensors must have the shape's dtype, be contiguous and aligned; otherwise ValueError.
        """
        rows, kind = self.shape.rows, self.shape.kind
        self._check("x", x, (rows, kind.k))
        self._check("weight", weight, (kind.n, kind.k))
        self._check("out", out, (rows, kind.n))
        description, weights, inputs, outputs, _ = self._problem.pointers
        written = c_void_p(out.data_ptr())
        self._library.call(
            "cublasLtMatmul", self._handle.pointer, description,
            byref(self._one), c_void_p(weight.data_ptr()), weights, c_void_p(x.data_ptr()), inputs,
            byref(self._beta), written, outputs, written, outputs,
            byref(self._algorithm),
            c_void_p(self._workspace.data_ptr()), c_size_t(WORKSPACE_BYTES),
            c_void_p(torch.cuda.current_stream(out.device).cuda_stream),
        )  # fmt: skip
        return out

    def _check(self, name: str, tensor: Tensor, size: tuple[int, int]) -> None:
        dtype = self.shape.kind.dtype
        if tensor.shape != size or tensor.dtype != dtype or not tensor.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous {dtype} {size}, got {tensor.dtype} "
                f"{tuple(tensor.shape)} with strides {tensor.stride()}"
            )
        if tensor.data_ptr() % ALIGNMENT:
            raise ValueError(f"{name} must be aligned to {ALIGNMENT} bytes")


def open_on(device: torch.device) -> CublasLt | None:
    """The library that torch uses on this device; None if there is none."""
    path = _loaded_path()
    return None if device.type != "cuda" or path is None else CublasLt(ctypes.CDLL(path), device)


def _loaded_path(maps: Path = Path("/proc/self/maps")) -> str | None:
    """Path of the loaded library: another copy would have other algorithms and memory."""
    if not maps.is_file():
        return None
    for line in maps.read_text().splitlines():
        *_, path = line.split(maxsplit=5)
        if Path(path).name.startswith("libcublasLt.so"):
            return path
    return None


class _Heuristic(ctypes.Structure):
    """C struct cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", _Algorithm),
        ("workspace_bytes", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


class _Library:
    """The library's functions; any status but success raises CublasError."""

    def __init__(self, library: ctypes.CDLL) -> None:
        library.cublasLtGetVersion.restype = c_size_t
        library.cublasLtGetStatusName.restype = c_char_p
        self._functions = library
        self.version = int(library.cublasLtGetVersion())

    def call(self, function: str, *arguments: object) -> None:
        """Calls a function. Raises CublasError with its name and the library's status name."""
        status = getattr(self._functions, function)(*arguments)
        if status:
            word = self._functions.cublasLtGetStatusName(status).decode()
            raise CublasError(f"{function}: {word} ({status})")

    def create(self, function: str, destroy: str, *arguments: object) -> "_Owned":
        pointer = c_void_p()
        self.call(function, byref(pointer), *arguments)
        return _Owned(pointer, getattr(self._functions, destroy))


class _Owned:
    """A library object that is destroyed with this object."""

    def __init__(self, pointer: c_void_p, destroy: object) -> None:
        self.pointer = pointer
        # Not at interpreter exit, when the library may have been unloaded.
        weakref.finalize(self, destroy, pointer).atexit = False  # type: ignore[arg-type]


class _Problem:
    """A shape in the library's column-major order: [K, N]ᵀ times [K, T] is [N, T]."""

    def __init__(self, library: _Library, shape: GemmShape) -> None:
        self.shape = shape
        description = library.create(
            "cublasLtMatmulDescCreate", "cublasLtMatmulDescDestroy", _COMPUTE_32F, _SCALE_32F
        )
        transposed = c_int(_OP_T)
        library.call(
            "cublasLtMatmulDescSetAttribute", description.pointer, _DESC_TRANSA,
            byref(transposed), c_size_t(ctypes.sizeof(transposed)),
        )  # fmt: skip
        kind, rows = shape.kind, shape.rows
        weight, x, out = (
            _layout(library, kind.dtype, *size)
            for size in ((kind.k, kind.n), (kind.k, rows), (kind.n, rows))
        )
        self._owned = (description, weight, x, out, out)

    @property
    def pointers(self) -> tuple[c_void_p, ...]:
        """Operation descriptor and layouts of A, B, C and D, as arguments of every call."""
        return tuple(owned.pointer for owned in self._owned)


def _layout(library: _Library, dtype: torch.dtype, height: int, width: int) -> _Owned:
    return library.create(
        "cublasLtMatrixLayoutCreate", "cublasLtMatrixLayoutDestroy", _DATA_TYPES[dtype],
        c_uint64(height), c_uint64(width), c_int64(height),
    )  # fmt: skip


def _preference(library: _Library) -> _Owned:
    preference = library.create("cublasLtMatmulPreferenceCreate", "cublasLtMatmulPreferenceDestroy")
    for attribute, value in (
        (_PREFERENCE_MAX_WORKSPACE_BYTES, c_uint64(WORKSPACE_BYTES)),
        (_PREFERENCE_REDUCTION_SCHEME_MASK, c_int(_REDUCTION_COMPUTE_TYPE)),
    ):
        library.call(
            "cublasLtMatmulPreferenceSetAttribute", preference.pointer, attribute, byref(value),
            c_size_t(ctypes.sizeof(value)),
        )  # fmt: skip
    return preference
