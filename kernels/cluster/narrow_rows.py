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
from kernels.quantized.narrow import SEGMENT, WORDS, NarrowWeight

ROWS_SOURCE = Path(__file__).with_name("narrow_rows.cu")
ROW_SOURCE = Path(__file__).with_name("narrow_row.cu")
MAX_ROWS = 32
# What follows is as in the sources.
OUTPUTS = 16  # of a tile
WARPS = 8
_FLOAT8, _INT4, _INT8 = 0, 1, 2
_TILES = (1, 2, 4)  # of 8 rows each
_MOST_COLUMNS = 16_384  # of one row's kernel; with a norm, half of them
_ENDING_BYTES = 320  # of its tile
# What one row's kernel is given, and how many of its blocks a multiprocessor has.
_STEP = 128
_LINEAR_STEPS = {_FLOAT8: 3, _INT4: 2, _INT8: 2}
_GATED_STEPS = 2
_MOST_TILES = 8
_ROW_BLOCKS = {"linear": 2, "normed": 3, "gated": 2}
_SHARED_BYTES = 227 << 10  # of a multiprocessor
_RESERVED_BYTES = 1 << 10  # of each block, by the system
# Two blocks leave no place for a third, which a multiprocessor with fewer blocks would lack; and
# of 8-bit floats none for the next product's, whose copies would come before this one's, but for
# attention over an FP8 cache.
_LINEAR_BYTES = {
    _FLOAT8: (_SHARED_BYTES - (45 << 10)) // 2,
    **dict.fromkeys((_INT4, _INT8), ((_SHARED_BYTES // 3 >> 10) + 1) << 10),
}

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
    """True if the kernels take a weight of this layout; its device is another question."""
    if weight.shape[0] % (2 * OUTPUTS if gated else OUTPUTS) or weight.data.shape[1] % SEGMENT:
        return False
    if not _is_by_groups(weight):
        return True
    is_power = weight.group & (weight.group - 1) == 0
    # Words of integers are a group's in all lanes; floats lie in their order.
    least = SEGMENT if weight.is_float else SEGMENT // WORDS
    return is_power and weight.group * weight.bits // 8 >= least


@dataclass(frozen=True, slots=True)
class NarrowLayout:
    """The target of a compilation: the kind of numbers, and what has scales of its own."""

    stored: int
    groups: int  # in a step of an output; 0: all columns have one scale
    is_paired: bool

    @classmethod
    def of(cls, weight: NarrowWeight) -> "NarrowLayout":
        """A weight's."""
        stored = _FLOAT8 if weight.is_float else _INT4 if weight.bits == 4 else _INT8
        groups = _STEP // (weight.group * weight.bits // 8) if _is_by_groups(weight) else 0
        return cls(stored, groups, weight.is_paired)

    def of_row(self) -> dict[str, int]:
        """Arguments that one row's kernel has in addition."""
        return {
            "GROUPS": self.groups, "STEP": _STEP, "LINEAR_STEPS": _LINEAR_STEPS[self.stored],
            "GATED_STEPS": _GATED_STEPS, "MOST_TILES": _MOST_TILES,
        }  # fmt: skip

    @property
    def words(self) -> int:
        """Words of a lane's in a segment, that have one scale."""
        return min(WORDS, 2 * WORDS // self.groups) if self.groups else 0


class NarrowRows:
    """The kernels for weights of one layout, on the current device."""

    def __init__(self, layout: NarrowLayout, kept: Path | None = None) -> None:
        """Compiled kernels are kept in a folder for the next start. Raises CannotCompile."""
        stored = {
            "STORED": layout.stored, "WORDS": layout.words, "PAIRED": int(layout.is_paired),
            "WARPS": WARPS,
        }  # fmt: skip
        self._layout = layout
        self._rows = Program(ROWS_SOURCE, stored, kept)
        self._row = Program(ROW_SOURCE, {**stored, **layout.of_row()}, kept)
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
        if NarrowLayout.of(weight) != self._layout or not (weight.is_float or weight.is_by_lanes):
            raise ValueError("the weight has another layout")
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
) -> tuple[NarrowRows, NarrowWeight] | None:
    """The kernels for a weight, and the weight as they read it.

    None: its device, its layout or the type of the rows has none.
    """
    if dtype != torch.bfloat16 or not can_run_on(weight.data.device) or not suits(weight):
        return None
    weight = weight.by_lanes()
    kernels = _compiled(NarrowLayout.of(weight), kept)
    return None if kernels is None else (kernels, weight)


@lru_cache
def _compiled(layout: NarrowLayout, kept: Path | None) -> NarrowRows | None:
    try:
        return NarrowRows(layout, kept)
    except CannotCompile as error:
        log.warning("quantization: slower kernels for few rows, %s", error)
        return None


def _is_by_groups(weight: NarrowWeight) -> bool:
    """True if scales are applied before the sum; integers have zero points, too."""
    return not weight.is_float or weight.scales.shape[1] > 1


def _row_launch(layout: NarrowLayout, name: str, num_columns: int) -> tuple[int, int]:
    """Shared memory of a block for one row, and how many blocks a multiprocessor has."""
    needed = _row_bytes(layout, name, num_columns) + _RESERVED_BYTES
    if name == "linear":
        needed = max(needed, _LINEAR_BYTES[layout.stored])
    at_once = min(_ROW_BLOCKS[name], _SHARED_BYTES // needed)
    return needed - _RESERVED_BYTES, at_once


def _row_bytes(layout: NarrowLayout, name: str, num_columns: int) -> int:
    """Shared memory of a block for one row: the source's `Shared`, x, and sums of its units."""
    parts = 2 if name == "gated" else 1
    has_zeros = layout.groups and layout.stored != _FLOAT8
    num_scales = max(1, layout.groups) * (2 if has_zeros and not layout.is_paired else 1)
    steps = _GATED_STEPS if name == "gated" else _LINEAR_STEPS[layout.stored]
    ring = steps * parts * WARPS * OUTPUTS * (_STEP + 4 * num_scales)
    sums = 2 * WARPS * parts * OUTPUTS * 4 + WARPS * (4 + 8)
    of_segment = SEGMENT * (2 if layout.stored == _INT4 else 1)  # columns
    units = num_columns // of_segment * (WORDS // layout.words) if has_zeros else 0
    return ring + sums + _MOST_TILES * _ENDING_BYTES + num_columns * 2 + units * 4


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
