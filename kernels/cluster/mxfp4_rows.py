"""Experts in MXFP4 for few rows: `mxfp4_rows.cu` says how.

    x [T, h], gate_up [E, 2I, h]                        ->  inner [T * per_row, I]
    inner, down [E, h, I], residual [T, h] or None      ->  [T, h]

The time is that of reading each chosen expert once, so an expert should have few of the rows.
"""

import ctypes
import logging
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

SOURCE = Path(__file__).with_name("mxfp4_rows.cu")
# As in the source.
_OUTPUTS, _ROWS, _WARPS = 16, 8, 8
_MOST_EXPERTS = 1024
_LARGEST_EXPONENT = 128  # 2^(e - 1) is a bfloat16
_MOST_ROWS_OF_AN_EXPERT = 6  # on average; beyond, weights are read too often

log = logging.getLogger(__name__)


class _Product(ctypes.Structure):
    _fields_ = (
        ("x", ctypes.c_void_p),
        ("codes", ctypes.c_void_p),
        ("exponents", ctypes.c_void_p),
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


class Mxfp4Rows:
    """The kernels for weights [E, N, K] of one layout, on the current device."""

    def __init__(self, layout: ExpertLayout, kept: Path | None = None) -> None:
        """Compiled kernels are kept in a folder for the next start. Raises CannotCompile."""
        defines = {
            "EXPERTS": layout.num_experts,
            "GROUPS": layout.num_columns // MXFP4_GROUP,
            "PER_ROW": layout.per_row,
            "WARPS": _WARPS,
        }
        self._layout = layout
        self._program = Program(SOURCE, defines, kept)
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
        num_experts, _, num_columns = weight.shape
        if ExpertLayout(num_experts, num_columns, routing.per_row) != self._layout:
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
        num_pairs, slabs = routing.num_pairs, num_outputs // _OUTPUTS
        # Each expert with rows may have one tile that is not full.
        tiles = min(self._layout.num_experts, num_pairs) + num_pairs // _ROWS
        num_blocks = slabs * {"gated_row": num_pairs, "summed_row": 1}.get(name, tiles)
        if (name, num_blocks) not in self._kernels:
            launch = Launch(num_blocks, 1, _WARPS * 32)
            self._kernels[name, num_blocks] = self._program.kernel(name, launch)
        return self._kernels[name, num_blocks]


@dataclass(frozen=True, slots=True)
class FewRowExperts:
    """The kernels of both products of a layer's experts."""

    of_gate_up: Mxfp4Rows
    of_down: Mxfp4Rows
    most_rows: int

    @classmethod
    def of(
        cls, gate_up: ExpertWeights, down: ExpertWeights, per_row: int, kept: Path | None = None
    ) -> "FewRowExperts | None":
        """The kernels for these weights; None: their device, type or layout has none."""
        if not suits(gate_up, gated=True) or not suits(down):
            return None
        found = [_compiled(_layout(each, per_row), kept) for each in (gate_up, down)]
        if found[0] is None or found[1] is None:
            return None
        most_rows = _MOST_ROWS_OF_AN_EXPERT * gate_up.shape[0] // per_row
        return cls(found[0], found[1], most_rows)


def suits(weight: ExpertWeights, gated: bool = False) -> bool:
    """True if the kernels take the weight; reads its exponents."""
    num_experts, num_outputs, num_columns = weight.shape
    if not weight.is_mxfp4 or weight.scales is None or not can_run_on(weight.values.device):
        return False
    if weight.bias is not None and weight.bias.dtype != torch.bfloat16:
        return False
    if num_experts > _MOST_EXPERTS or num_columns % MXFP4_GROUP:
        return False
    if num_outputs % (2 * _OUTPUTS if gated else _OUTPUTS):
        return False
    return int(weight.scales.max()) <= _LARGEST_EXPONENT


def _layout(weight: ExpertWeights, per_row: int) -> ExpertLayout:
    num_experts, _, num_columns = weight.shape
    return ExpertLayout(num_experts, num_columns, per_row)


@lru_cache
def _compiled(layout: ExpertLayout, kept: Path | None) -> Mxfp4Rows | None:
    try:
        return Mxfp4Rows(layout, kept)
    except CannotCompile as error:
        log.warning("experts: slower kernels for few rows, %s", error)
        return None


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
