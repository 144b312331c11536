"""Linear layers for up to 32 rows with a weight in 4 or 8 bits; `narrow_rows.cu` says how.

    x [M, K] bfloat16, weight [N, K] in `NarrowWeight`  ->  y = x @ weight.T  [M, N]
    with norm [K]:         y = rms_norm(x) @ weight.T
    with norm, and gated:  silu(gate) * up  [M, N / 2], where gate and up are the halves of y
    with bias [N], residual [M, N]:  added

The time is that of reading the weight once.
"""

import ctypes
import logging
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from kernels.cluster.program import CannotCompile, Kernel, Launch, Program
from kernels.quantized.narrow import NarrowWeight

SOURCE = Path(__file__).with_name("narrow_rows.cu")
MAX_ROWS = 32
_LANE_BYTES = 16  # of a row that a lane loads at once, in one group
OUTPUTS = 16  # of a block
SEGMENT = 64  # bytes of a row that are loaded at once
WARPS = 8
_FLOAT8, _INT4, _INT8 = 0, 1, 2  # as in the source
_TILES = (1, 2, 4)  # of 8 rows each
_MIN_CAPABILITY = (9, 0)

log = logging.getLogger(__name__)


class _Layer(ctypes.Structure):
    _fields_ = (
        ("x", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("offsets", ctypes.c_void_p),
        ("norm", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("residual", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("x_stride", ctypes.c_int64),
        ("num_rows", ctypes.c_int),
        ("num_outputs", ctypes.c_int),
        ("num_columns", ctypes.c_int),
        ("num_bytes", ctypes.c_int),
        ("num_groups", ctypes.c_int),
        ("group_bits", ctypes.c_int),
        ("eps", ctypes.c_float),
    )


def suits(weight: NarrowWeight, gated: bool = False) -> bool:
    """Whether the kernels take a weight of this layout; its device is another question."""
    if weight.shape[0] % (2 * OUTPUTS if gated else OUTPUTS) or weight.data.shape[1] % SEGMENT:
        return False
    if not _is_by_groups(weight):
        return True
    is_power = weight.group & (weight.group - 1) == 0
    return is_power and weight.group * weight.bits // 8 >= _LANE_BYTES


class NarrowRows:
    """The kernels for weights of one layout, on the current device."""

    def __init__(self, stored: int, by_groups: bool, kept: Path | None = None) -> None:
        """Compiled kernels are kept in a folder for the next start. Raises CannotCompile."""
        defines = {"STORED": stored, "BY_GROUPS": int(by_groups), "WARPS": WARPS}
        self._program = Program(SOURCE, defines, kept)
        self._kernels: dict[tuple[str, int], Kernel] = {}

    def linear(
        self,
        x: Tensor,
        weight: NarrowWeight,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        norm: Tensor | None = None,
        eps: float = 0.0,
        gated: bool = False,
    ) -> Tensor:
        """The product, as this module says. Raises ValueError for what the kernels do not take."""
        (m, k), (n, num_columns) = x.shape, weight.shape
        if not 1 <= m <= MAX_ROWS or k != num_columns or not suits(weight, gated):
            raise ValueError(f"x {list(x.shape)} and a weight {list(weight.shape)}")
        if x.dtype != torch.bfloat16 or x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:
            raise ValueError(f"x must be bfloat16 with aligned rows, it is {x.dtype} {x.stride()}")
        if gated and norm is None:
            raise ValueError("a gated layer has a norm")
        width = n // 2 if gated else n
        if residual is not None and (residual.shape != (m, width) or not residual.is_contiguous()):
            raise ValueError(f"residual must be contiguous [{m}, {width}]")
        out = x.new_empty((m, width))
        name = "gated" if gated else "linear" if norm is None else "normed"
        tiles = next(tiles for tiles in _TILES if m <= 8 * tiles)
        self._kernel(f"{name}_{tiles}", width // OUTPUTS)(
            _Layer(
                *(_address(tensor) for tensor in (x, weight.data, weight.scales, weight.offsets)),
                *(_address(tensor) for tensor in (norm, bias, residual, out)),
                x.stride(0), m, n, k, weight.data.shape[1],
                weight.scales.shape[1], weight.group.bit_length() - 1, eps,
            )
        )  # fmt: skip
        return out

    def _kernel(self, name: str, num_blocks: int) -> Kernel:
        kernel = self._kernels.get((name, num_blocks))
        if kernel is None:
            kernel = self._program.kernel(name, Launch(num_blocks, 1, WARPS * 32))
            self._kernels[name, num_blocks] = kernel
        return kernel


def kernels_for(
    weight: NarrowWeight, dtype: torch.dtype, kept: Path | None = None
) -> NarrowRows | None:
    """The kernels for a weight; None: its device, its layout or the type of the rows has none."""
    if dtype != torch.bfloat16 or not weight.data.is_cuda or not suits(weight):
        return None
    if torch.cuda.get_device_capability(weight.data.device) < _MIN_CAPABILITY:
        return None
    stored = _FLOAT8 if weight.offsets is None else _INT4 if weight.bits == 4 else _INT8
    return _compiled(stored, _is_by_groups(weight), kept)


@lru_cache
def _compiled(stored: int, by_groups: bool, kept: Path | None) -> NarrowRows | None:
    try:
        return NarrowRows(stored, by_groups, kept)
    except CannotCompile as error:
        log.warning("quantization: slower kernels for few rows, %s", error)
        return None


def _is_by_groups(weight: NarrowWeight) -> bool:
    """Whether scales are applied before the sum; integers have offsets, too."""
    return weight.offsets is not None or weight.scales.shape[1] > 1


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
