"""Experts in few bits for few rows: `expert_rows.cu` says how.

    x [T, h], gate_up [E, 2I, h]                        ->  inner [T * per_row, I]
    inner, down [E, h, I], residual [T, h] or None      ->  [T, h]

The time is that of reading each chosen expert once, so an expert should have few of the rows.
"""

import ctypes
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from kernels.cluster.program import CannotCompile, Kernel, Launch, Program, can_run_on
from kernels.expert_clamp import Clamp
from kernels.experts.grouped_linear import combined
from kernels.experts.router import Routing
from kernels.experts.weights import MXFP4_GROUP, ExpertWeights

SOURCE = Path(__file__).with_name("expert_rows.cu")
# As in the source.
_OUTPUTS, _ROWS = 16, 8
_MOST_EXPERTS = 1024
_LARGEST_EXPONENT = 128  # 2^(e - 1) is a bfloat16
_SEGMENT = 64  # columns of e4m3 that four lanes have at once

log = logging.getLogger(__name__)


class _Product(ctypes.Structure):
    _fields_ = (
        ("x", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("experts", ctypes.c_void_p),
        ("shares", ctypes.c_void_p),
        ("counts", ctypes.c_void_p),
        ("pairs", ctypes.c_void_p),
        ("residual", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("x_stride", ctypes.c_int64),
        ("num_rows", ctypes.c_int),
        ("num_outputs", ctypes.c_int),
        ("rows_of_a_token", ctypes.c_int),
        ("limit", ctypes.c_float),
        ("alpha", ctypes.c_float),
    )


@dataclass(frozen=True, slots=True)
class ExpertLayout:
    """The target of a compilation."""

    num_experts: int
    num_columns: int
    per_row: int
    is_mxfp4: bool  # else e4m3
    group: int  # columns that share a scale; 0: all
    is_gated: bool = False  # half of the outputs gate the others

    @classmethod
    def of(cls, weight: ExpertWeights, per_row: int, *, gated: bool = False) -> "ExpertLayout":
        """The layout of a weight that suits."""
        num_experts, _, num_columns = weight.shape
        return cls(num_experts, num_columns, per_row, weight.is_mxfp4, weight.group or 0, gated)


@dataclass(frozen=True, slots=True)
class BlockTiling:
    """The way in which blocks share a product out."""

    warps: int  # each with a slice of the columns
    blocks: int  # of a multiprocessor
    ahead: int  # loads of 16 outputs' weights that a lane asks for at once
    parts: int = 1  # 16 outputs each of a block, where none gates another


# Measured on an H200 with the experts of Qwen3-30B-A3B, Qwen3.5-35B-A3B and gpt-oss-20b.
_TILINGS = {
    "gated_row": BlockTiling(8, 3, 4),
    "summed_row": BlockTiling(16, 1, 8),
    "gated_rows": BlockTiling(4, 5, 4),
    "linear_rows": BlockTiling(2, 8, 8, 4),
}
_TILINGS_OF_MXFP4 = {
    "gated_row": BlockTiling(8, 3, 4),
    "summed_row": BlockTiling(8, 2, 6),
    "gated_rows": BlockTiling(4, 6, 4),
    "linear_rows": BlockTiling(4, 6, 4, 2),
}
# Of an expert on average; with more `grouped_linear` is quicker.
_MOST_ROWS, _MOST_ROWS_OF_MXFP4 = 4, 6


def tilings_of(layout: ExpertLayout) -> Mapping[str, BlockTiling]:
    """The tiling of each kernel."""
    return _TILINGS_OF_MXFP4 if layout.is_mxfp4 else _TILINGS


def defines(layout: ExpertLayout, tilings: Mapping[str, BlockTiling]) -> dict[str, int]:
    """The macros of the source."""
    found = {
        "EXPERTS": layout.num_experts,
        "COLUMNS": layout.num_columns,
        "PER_ROW": layout.per_row,
        "IS_MXFP4": int(layout.is_mxfp4),
        "GROUP": layout.group,
        "IS_GATED": int(layout.is_gated),
        "LINEAR_PARTS": tilings["linear_rows"].parts,
    }
    for name, tiling in tilings.items():
        macro = name.upper()
        found[f"{macro}_WARPS"] = tiling.warps
        found[f"{macro}_BLOCKS"] = tiling.blocks
        found[f"{macro}_AHEAD"] = tiling.ahead
    return found


class ExpertRows:
    """The kernels for weights [E, N, K] of one layout, on the current device."""

    def __init__(
        self,
        layout: ExpertLayout,
        kept: Path | None = None,
        tilings: Mapping[str, BlockTiling] | None = None,
    ) -> None:
        """Compiled kernels are kept in a folder for the next start. Raises CannotCompile."""
        self._layout, self._tilings = layout, tilings or tilings_of(layout)
        self._program = Program(SOURCE, defines(layout, self._tilings), kept)
        self._kernels: dict[tuple[str, int], Kernel] = {}

    def gated(
        self, x: Tensor, gate_up: ExpertWeights, routing: Routing, clamp: Clamp | None = None
    ) -> Tensor:
        """silu(gate) * up of each pair, or the activation of `clamp`: [T * per_row, I]."""
        out = x.new_empty((routing.num_pairs, gate_up.shape[1] // 2))
        name = "gated_row" if len(x) == 1 else "gated_rows"
        self._launch(name, x, gate_up, routing, out, routing.per_row, clamp=clamp)
        return out

    def summed(
        self, x: Tensor, down: ExpertWeights, routing: Routing, residual: Tensor | None
    ) -> Tensor:
        """The weighted sum over each row's pairs x [T * per_row, I], plus the residual: [T, h]."""
        if len(routing.experts) == 1:
            out = x.new_empty((1, down.shape[1]))
            self._launch("summed_row", x, down, routing, out, 1, residual)
            return out
        out = x.new_empty((routing.num_pairs, down.shape[1]))
        self._launch("linear_rows", x, down, routing, out, 1)
        return combined(out, routing, residual)

    def _launch(
        self,
        name: str,
        x: Tensor,
        weight: ExpertWeights,
        routing: Routing,
        out: Tensor,
        rows_of_a_token: int,
        residual: Tensor | None = None,
        clamp: Clamp | None = None,
    ) -> None:
        weight.check(x)
        is_gated = name.startswith("gated")
        if ExpertLayout.of(weight, routing.per_row, gated=is_gated) != self._layout:
            raise ValueError(f"weights {weight.shape} have another layout than {self._layout}")
        if x.dtype != torch.bfloat16 or x.stride(0) % 8 or x.data_ptr() % 16:
            raise ValueError(f"x must be bfloat16 with aligned rows, it is {x.dtype} {x.stride()}")
        product = _Product(
            *(_address(each) for each in (x, weight.values, weight.scales, weight.bias)),
            *(_address(each) for each in (routing.experts, routing.weights, routing.counts)),
            *(_address(each) for each in (routing.pairs, residual, out)),
            x.stride(0), len(routing.experts), out.shape[1], rows_of_a_token,
            0.0 if clamp is None else clamp.limit, 1.0 if clamp is None else clamp.alpha,
        )  # fmt: skip
        self._kernel(name, out.shape[1], routing)(product)

    def _kernel(self, name: str, num_outputs: int, routing: Routing) -> Kernel:
        num_pairs, tiling = routing.num_pairs, self._tilings[name]
        slabs = num_outputs // (_OUTPUTS * tiling.parts)
        # Each expert with rows may have one tile that is not full.
        tiles = min(self._layout.num_experts, num_pairs) + num_pairs // _ROWS
        num_blocks = slabs * {"gated_row": num_pairs, "summed_row": 1}.get(name, tiles)
        if (name, num_blocks) not in self._kernels:
            launch = Launch(num_blocks, 1, tiling.warps * 32)
            self._kernels[name, num_blocks] = self._program.kernel(name, launch)
        return self._kernels[name, num_blocks]


@dataclass(frozen=True, slots=True)
class FewRowExperts:
    """The kernels of both products of a layer's experts."""

    of_gate_up: ExpertRows
    of_down: ExpertRows
    most_rows: int

    @classmethod
    def of(
        cls, gate_up: ExpertWeights, down: ExpertWeights, per_row: int, kept: Path | None = None
    ) -> "FewRowExperts | None":
        """The kernels for these weights; None: their device, type or layout has none."""
        if not suits(gate_up, gated=True) or not suits(down):
            return None
        of_gate_up = _compiled(ExpertLayout.of(gate_up, per_row, gated=True), kept)
        of_down = _compiled(ExpertLayout.of(down, per_row), kept)
        if of_gate_up is None or of_down is None:
            return None
        of_expert = _MOST_ROWS_OF_MXFP4 if gate_up.is_mxfp4 else _MOST_ROWS
        most_rows = of_expert * gate_up.shape[0] // per_row
        return cls(of_gate_up, of_down, most_rows)


def suits(weight: ExpertWeights, gated: bool = False) -> bool:
    """True if the kernels take the weight; reads its exponents."""
    num_experts, num_outputs, num_columns = weight.shape
    if weight.scales is None or not can_run_on(weight.values.device):
        return False
    if weight.bias is not None and weight.bias.dtype != torch.bfloat16:
        return False
    parts = 2 if gated else tilings_of(ExpertLayout.of(weight, 1))["linear_rows"].parts
    if num_experts > _MOST_EXPERTS or num_outputs % (parts * _OUTPUTS):
        return False
    if weight.is_mxfp4:
        fits = num_columns % MXFP4_GROUP == 0
        return fits and int(weight.scales.max()) <= _LARGEST_EXPONENT
    return not num_columns % _SEGMENT and not (weight.group or 0) % _SEGMENT


@lru_cache
def _compiled(layout: ExpertLayout, kept: Path | None) -> ExpertRows | None:
    try:
        return ExpertRows(layout, kept)
    except CannotCompile as error:
        log.warning("experts: slower kernels for few rows, %s", error)
        return None


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
