"""Linear layers for up to 32 rows with a weight in 4 or 8 bits.

`narrow_row.cu` says how for one row, `narrow_rows.cu` for more; of the same row both give the same.

    x [M, K] bfloat16, weight [N, K] in `NarrowWeight`  ->  y = x @ weight.T  [M, N]
    with norm [K]:         y = rms_norm(x) @ weight.T
    with norm, and gated:  silu(gate) * up  [M, N / 2], where gate and up are the halves of y
    with bias [N], residual [M, N]:  added

The time is that of reading the weight once.
"""

import ctypes
import logging
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from kernels.cluster.program import (
    CannotCompile,
    Kernel,
    Launch,
    Program,
    can_run_on,
    num_processors,
)
from kernels.quantized.narrow import NarrowWeight

ROWS_SOURCE = Path(__file__).with_name("narrow_rows.cu")
ROW_SOURCE = Path(__file__).with_name("narrow_row.cu")
MAX_ROWS = 32
# What follows is as in the sources.
_LANE_BYTES = 16  # of an output that a lane takes at once, in one group
OUTPUTS = 16  # of a tile
SEGMENT = 64  # bytes of an output that are multiplied at once
WARPS = 8
_FLOAT8, _INT4, _INT8 = 0, 1, 2
_BY_ROW, _BY_SEGMENT, _BY_LANE = 0, 1, 2
_TILES = (1, 2, 4)  # of 8 rows each
_MOST_COLUMNS = 16_384  # of one row's kernel; with a norm, half of them
_ENDING_BYTES = 320  # of its tile
# What one row's kernel is given, and how many of its blocks a multiprocessor has.
_STEP = 128
_STEPS = {1: 3, 2: 2}  # by the number of outputs' parts
_MOST_TILES = 8
_ROW = {
    "STEP": _STEP, "LINEAR_STEPS": _STEPS[1], "GATED_STEPS": _STEPS[2], "MOST_TILES": _MOST_TILES,
}  # fmt: skip
_ROW_BLOCKS = {"linear": 2, "normed": 3, "gated": 2}
_SHARED_BYTES = 227 << 10  # of a multiprocessor
_RESERVED_BYTES = 1 << 10  # of each block, by the system
_FILLED_BYTES = _SHARED_BYTES - (45 << 10)  # attention over an FP8 cache needs the rest

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


@dataclass(frozen=True, slots=True)
class NarrowLayout:
    """What kernels are compiled for: the kind of numbers, and what has scales of its own."""

    stored: int
    scaled: int
    groups: int  # in a step of an output; 0: all columns have one scale

    @classmethod
    def of(cls, weight: NarrowWeight) -> "NarrowLayout":
        """A weight's."""
        stored = _FLOAT8 if weight.offsets is None else _INT4 if weight.bits == 4 else _INT8
        if not _is_by_groups(weight):
            return cls(stored, _BY_ROW, 0)
        group_bytes = weight.group * weight.bits // 8
        return cls(stored, _BY_LANE if group_bytes % SEGMENT else _BY_SEGMENT, _STEP // group_bytes)


class NarrowRows:
    """The kernels for weights of one layout, on the current device."""

    def __init__(self, layout: NarrowLayout, kept: Path | None = None) -> None:
        """Compiled kernels are kept in a folder for the next start. Raises CannotCompile."""
        stored = {"STORED": layout.stored, "WARPS": WARPS}
        self._layout = layout
        self._rows = Program(ROWS_SOURCE, {**stored, "SCALED": layout.scaled}, kept)
        self._row = Program(ROW_SOURCE, {**stored, **_ROW, "GROUPS": layout.groups}, kept)
        self._processors = num_processors()
        self._kernels: dict[tuple[str, int, int], Kernel] = {}

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
        self._kernel(name, m, weight)(
            _Layer(
                *(_address(tensor) for tensor in (x, weight.data, weight.scales, weight.offsets)),
                *(_address(tensor) for tensor in (norm, bias, residual, out)),
                x.stride(0), m, n, k, weight.data.shape[1],
                weight.scales.shape[1], weight.group.bit_length() - 1, eps,
            )
        )  # fmt: skip
        return out

    def _kernel(self, name: str, num_rows: int, weight: NarrowWeight) -> Kernel:
        (n, k), num_bytes = weight.shape, weight.data.shape[1]
        num_tiles = n // (2 * OUTPUTS if name == "gated" else OUTPUTS)
        most_columns = _MOST_COLUMNS if name == "linear" else _MOST_COLUMNS // 2
        is_one = num_rows == 1 and num_bytes % (WARPS * _STEP) == 0 and k <= most_columns
        tiles = 0 if is_one else next(tiles for tiles in _TILES if num_rows <= 8 * tiles)
        key = f"{name}_{tiles}", num_tiles, k
        if key not in self._kernels:
            launch = Launch(num_tiles, 1, WARPS * 32)
            if is_one:
                row_bytes, at_once = _row_launch(self._layout, name, k)
                num_blocks = min(num_tiles, self._processors * at_once)
                num_blocks = max(num_blocks, -(-num_tiles // _MOST_TILES))
                launch = Launch(num_blocks, 1, WARPS * 32, row_bytes)
            program, of_source = (self._row, name) if is_one else (self._rows, key[0])
            self._kernels[key] = program.kernel(of_source, launch)
        return self._kernels[key]


def kernels_for(
    weight: NarrowWeight, dtype: torch.dtype, kept: Path | None = None
) -> NarrowRows | None:
    """The kernels for a weight; None: its device, its layout or the type of the rows has none."""
    if dtype != torch.bfloat16 or not can_run_on(weight.data.device) or not suits(weight):
        return None
    return _compiled(NarrowLayout.of(weight), kept)


@lru_cache
def _compiled(layout: NarrowLayout, kept: Path | None) -> NarrowRows | None:
    try:
        return NarrowRows(layout, kept)
    except CannotCompile as error:
        log.warning("quantization: slower kernels for few rows, %s", error)
        return None


def _is_by_groups(weight: NarrowWeight) -> bool:
    """Whether scales are applied before the sum; integers have offsets, too."""
    return weight.offsets is not None or weight.scales.shape[1] > 1


def _row_launch(layout: NarrowLayout, name: str, num_columns: int) -> tuple[int, int]:
    """Shared memory of a block for one row, and how many blocks a multiprocessor has."""
    needed = _row_bytes(layout, name, num_columns) + _RESERVED_BYTES
    at_once = min(_ROW_BLOCKS[name], _SHARED_BYTES // needed)
    # The next kernel's copies would come before this one's: leave it no place. Integers, which take
    # longer to compute than to read, are no quicker for it.
    if name == "linear" and layout.groups == 0:
        needed = max(needed, _FILLED_BYTES // at_once)
    return needed - _RESERVED_BYTES, at_once


def _row_bytes(layout: NarrowLayout, name: str, num_columns: int) -> int:
    """Shared memory of a block for one row: the source's `Shared`, and x."""
    parts = 2 if name == "gated" else 1
    num_scales = 2 * max(1, layout.groups)  # and offsets, of a step of an output
    ring = _STEPS[parts] * parts * WARPS * OUTPUTS * (_STEP + 4 * num_scales)
    sums = 2 * WARPS * parts * OUTPUTS * 4 + WARPS * 4
    return ring + sums + _MOST_TILES * _ENDING_BYTES + num_columns * 2


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
