"""Matrix products by an algorithm of the library's that the caller names.

    x [T, K], weight [N, K], out [T, N]:  out = x @ weight.T, or out += x @ weight.T

The library is cuBLASLt, as torch has loaded it. Asked for a product, torch takes the first that the
library's heuristic finds; here are others, and the caller chooses one by its time: all that
the heuristic names, or its first ones and those of tiles that fit (`cublas_tiles`). Sums are
float32, those of slices of K too, and rounded once.
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

# The numbers of the library's header.
_DATA_TYPES = {torch.float16: 2, torch.bfloat16: 14}
_COMPUTE_32F, _SCALE_32F = 68, 0
_DESC_TRANSA, _OP_T = 3, 1
_PREFERENCE_MAX_WORKSPACE_BYTES, _PREFERENCE_REDUCTION_SCHEME_MASK = 1, 3
_REDUCTION_NONE, _REDUCTION_COMPUTE_TYPE = 0, 2
_CONFIG_TILE, _CONFIG_SPLITS, _CONFIG_REDUCTION = 1, 2, 3
_CONFIG_OPTION, _CONFIG_CLUSTER = 5, 8

WORKSPACE_BYTES = 32 << 20
ALIGNMENT = 256  # of every tensor, in bytes: what the heuristic takes for granted
_MAX_NAMED = 32
_TRIED_MAJOR = 13
_FEW_NAMED = 2  # of those that the heuristic names, where tiles fit better
_Algorithm = c_uint64 * 8


class CublasError(RuntimeError):
    """A call of the library failed, or an algorithm does not serve."""


@dataclass(frozen=True, slots=True)
class ProductKind:
    """Products with a weight [N, K], of rows of its type."""

    n: int
    k: int
    dtype: torch.dtype
    adds: bool  # to what the output holds


@dataclass(frozen=True, slots=True)
class ProductShape:
    """A product of so many rows."""

    rows: int
    kind: ProductKind


def serves(dtype: torch.dtype) -> bool:
    """Whether products of this type can be had here."""
    return dtype in _DATA_TYPES


class CublasLt:
    """The library on one device. Products share a workspace: one at a time, on one stream."""

    def __init__(self, library: ctypes.CDLL, device: torch.device) -> None:
        self._library = _Library(library)
        self._handle = self._library.create("cublasLtCreate", "cublasLtDestroy")
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        properties = torch.cuda.get_device_properties(device)
        self._num_multiprocessors = int(properties.multi_processor_count)
        # Where tiles by their numbers have been tried; an option's bits may mean others elsewhere.
        self._has_tiles = properties.major == 9 and self.version // 10_000 == _TRIED_MAJOR

    @property
    def version(self) -> int:
        return self._library.version

    def candidates(self, shape: ProductShape) -> list[bytes]:
        """Algorithms that serve a product, the library's own choice first."""
        problem = _Problem(self._library, shape)
        named = self._named(problem)
        fitted = self._fitted(problem, named[0]) if self._has_tiles and named else []
        return list(dict.fromkeys([*named[:_FEW_NAMED], *fitted])) if fitted else named

    def product(self, shape: ProductShape, algorithm: bytes) -> "LibraryProduct":
        """The product by an algorithm of `candidates`, which may be another process's.

        Raises CublasError for one that does not serve here.
        """
        if len(algorithm) != ctypes.sizeof(_Algorithm):
            raise CublasError(f"an algorithm of {len(algorithm)} bytes, not 64")
        problem, known = _Problem(self._library, shape), _Algorithm.from_buffer_copy(algorithm)
        self._check(problem, known)
        return LibraryProduct(self._library, self._handle, problem, known, self._workspace)

    def _named(self, problem: "_Problem") -> list[bytes]:
        """What the library's heuristic names."""
        preference = _preference(self._library)
        found, count = (_Heuristic * _MAX_NAMED)(), c_int()
        self._library.call(
            "cublasLtMatmulAlgoGetHeuristic", self._handle.pointer, *problem.pointers,
            preference.pointer, _MAX_NAMED, found, byref(count),
        )  # fmt: skip
        return [bytes(one.algorithm) for one in found[: count.value] if one.state == 0]

    def _fitted(self, problem: "_Problem", named: bytes) -> list[bytes]:
        """The algorithm by tiles that fit, as far as the library has them."""
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
        """Raises CublasError for an algorithm that does not serve."""
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


class LibraryProduct:
    """One shape's product by one algorithm; to be called with any weight of the shape."""

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
        """x [T, K] times weight [N, K] into `out` [T, N], which is returned.

        All of the shape's type, contiguous and aligned; raises ValueError otherwise.
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
    """The library that torch multiplies with on this device; None where there is none."""
    path = _loaded_path()
    return None if device.type != "cuda" or path is None else CublasLt(ctypes.CDLL(path), device)


def _loaded_path(maps: Path = Path("/proc/self/maps")) -> str | None:
    """Another copy of the library would have other algorithms, and memory of its own."""
    if not maps.is_file():
        return None
    for line in maps.read_text().splitlines():
        *_, path = line.split(maxsplit=5)
        if Path(path).name.startswith("libcublasLt.so"):
            return path
    return None


class _Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", _Algorithm),
        ("workspace_bytes", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


class _Library:
    """The library's functions; a status that is not success is an error."""

    def __init__(self, library: ctypes.CDLL) -> None:
        library.cublasLtGetVersion.restype = c_size_t
        library.cublasLtGetStatusName.restype = c_char_p
        self._functions = library
        self.version = int(library.cublasLtGetVersion())

    def call(self, function: str, *arguments: object) -> None:
        """Raises CublasError with the function's name and the library's word for the failure."""
        status = getattr(self._functions, function)(*arguments)
        if status:
            word = self._functions.cublasLtGetStatusName(status).decode()
            raise CublasError(f"{function}: {word} ({status})")

    def create(self, function: str, destroy: str, *arguments: object) -> "_Owned":
        pointer = c_void_p()
        self.call(function, byref(pointer), *arguments)
        return _Owned(pointer, getattr(self._functions, destroy))


class _Owned:
    """Something of the library's that goes with this object."""

    def __init__(self, pointer: c_void_p, destroy: object) -> None:
        self.pointer = pointer
        # Not at the end of the process, when the library may have gone already.
        weakref.finalize(self, destroy, pointer).atexit = False  # type: ignore[arg-type]


class _Problem:
    """A shape as the library has it: in its order of columns, [K, N]ᵀ times [K, T] is [N, T]."""

    def __init__(self, library: _Library, shape: ProductShape) -> None:
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
        """The description and the layouts of A, B, C and D, as every call takes them."""
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
