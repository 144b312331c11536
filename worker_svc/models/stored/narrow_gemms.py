"""GEMMs on CUDA with weights in 4 or 8 bits; they stand where `FusedLinear` and `NormedLinear` do.

Few rows: the weight is widened in registers, by `kernels.cluster.narrow_rows`, which has the
neighbouring operations fused, or where that does not suit by `kernels.quantized.linear`. More rows:
8-bit floats are multiplied as they are if the checkpoint is made for rows in 8 bits, which are
rounded then; other weights are made wide first.
"""

import logging
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.cluster import narrow_rows
from kernels.cluster.narrow_rows import NarrowRows
from kernels.comm.all_reduce import all_reduce
from kernels.comm.inboxes import Inboxes
from kernels.norm.rms_norm import rms_norm
from kernels.norm.silu_and_mul import silu_and_mul
from kernels.quantized import linear as kernels
from kernels.quantized import rounded_rows
from kernels.quantized.narrow import NarrowWeight
from kernels.quantized.rounded_rows import RoundedRows
from kernels.quantized.scaled import FLOAT8
from worker_svc.config import kernel_cache
from worker_svc.models.fused_gemms import FusedLinear, Hidden, NormedLinear
from worker_svc.models.layers import RMSNorm
from worker_svc.models.linear import Linear
from worker_svc.parallel.peer_memory import Slot

# Rows that keep their type where more are rounded: products in 8 bits are quicker above, 4.9 ms a
# step of 64 rows of an 8B model on H200 where 32 rows in registers take 6.3.
_MOST_KEPT = 16
_LIBRARY_MULTIPLE = 16  # of inputs and outputs

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NarrowLinear:
    """y = x @ W.T + b, with weight [N, K] and bias [N]."""

    weight: NarrowWeight
    bias: Tensor | None
    rows: NarrowRows | None = None  # the fused kernels of few rows, where they suit
    unit: Tensor | None = None  # the number 1 on the device; None: many rows keep their type

    @classmethod
    def of(cls, weight: NarrowWeight, bias: Tensor | None, dtype: torch.dtype) -> "NarrowLinear":
        """The GEMM of rows of a type."""
        unit = None
        if dtype == torch.bfloat16 and _multiplies_in_8_bits(weight):
            unit = torch.ones((), device=weight.data.device)
        fused = narrow_rows.kernels_for(weight, dtype, kernel_cache() / "cluster")
        rows, weight = fused or (None, weight)
        return cls(weight, bias, rows, unit)

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, K] -> [T, N]."""
        if (rows := self.rows_for(len(x))) is not None:
            return rows.linear(x, self.weight, self.bias)
        if self.rounds(len(x)):
            return self.of_rounded(rounded_rows.rounded(x))
        if len(x) <= kernels.MAX_ROWS:
            return kernels.linear(x, self.weight, self.bias)
        return F.linear(x, kernels.dequantized(self.weight, x.dtype), self.bias)

    def added(self, x: Tensor, residual: Tensor) -> Tensor:
        """x @ W.T + b plus the residual [T, N], which may be overwritten."""
        if (rows := self.rows_for(len(x))) is not None:
            return rows.linear(x, self.weight, self.bias, residual)
        if self.rounds(len(x)):
            return self.of_rounded(rounded_rows.rounded(x), residual)
        if len(x) <= kernels.MAX_ROWS:
            return kernels.linear(x, self.weight, self.bias, residual)
        if self.bias is not None:
            residual += self.bias
        return residual.addmm_(x, kernels.dequantized(self.weight, x.dtype).t())

    def summed(
        self,
        x: Tensor,
        inboxes: Inboxes,
        slot: Slot,
        residual: Tensor,
        norm: Tensor | None,
        eps: float,
    ) -> tuple[Tensor, Tensor | None]:
        """(all-reduce of x @ W.T + b plus the residual, norm of that sum if `norm` is given)."""
        return all_reduce(self(x), inboxes, slot, residual, norm, eps)

    def product(self, values: Tensor) -> Tensor:
        """Values [T, K] in 8 bits times those of the weight -> [T, N], without any scale."""
        assert self.unit is not None
        weight = self.weight.data.view(FLOAT8).t()
        return torch._scaled_mm(values, weight, self.unit, self.unit, out_dtype=torch.bfloat16)

    @property
    def output_scales(self) -> Tensor:
        """[N], of a weight whose columns have one scale."""
        return self.weight.scales.view(-1)

    def of_rounded(self, x: RoundedRows, residual: Tensor | None = None) -> Tensor:
        """x @ W.T + b, plus the residual."""
        y = self.product(x.values)
        return rounded_rows.rescaled(y, x.scales, self.output_scales, self.bias, residual)

    def added_and_rounded(self, x: Tensor, residual: Tensor, norm: Tensor, eps: float) -> Hidden:
        """`added` for rows that are rounded, and the norm of that, rounded."""
        values, scales = rounded_rows.rounded(x)
        y = self.product(values)
        given = (scales, self.output_scales, self.bias, residual, norm, eps)
        return Hidden(y, rounded=rounded_rows.rescaled_and_rounded(y, *given))

    def rounds(self, num_rows: int) -> bool:
        """True if so many rows are rounded to 8 bits."""
        return self.unit is not None and num_rows > _MOST_KEPT

    def rows_for(self, num_rows: int) -> NarrowRows | None:
        """The fused kernels, if they compute this number of rows."""
        is_few = num_rows <= narrow_rows.MAX_ROWS and not self.rounds(num_rows)
        return self.rows if is_few else None


@dataclass(frozen=True, slots=True)
class NormedNarrowLinear:
    """y = norm(x) @ W.T + b; but for few rows the norm is a kernel of its own."""

    linear: NarrowLinear
    norm: Tensor  # [K]

    @property
    def bias(self) -> Tensor | None:
        """[N]."""
        return self.linear.bias

    def __call__(self, hidden: Hidden, eps: float) -> tuple[Tensor, Tensor | None]:
        """(norm(x) @ W.T + b [T, N], None: nothing is left to divide by)."""
        x, linear = hidden.residual, self.linear
        if hidden.normed is not None:
            return linear(hidden.normed), None
        if (rows := linear.rows_for(len(x))) is not None:
            return rows.linear(x, linear.weight, linear.bias, norm=self.norm, eps=eps), None
        if linear.rounds(len(x)):
            return linear.of_rounded(self._rounded(hidden, eps)), None
        return linear(rms_norm(x, self.norm, eps)), None

    def gated(self, hidden: Hidden, eps: float, gelu: bool = False) -> Tensor:
        """silu(gate) * up, or with gelu; they are the halves of norm(x) @ W.T: [T, N / 2]."""
        if gelu:
            return silu_and_mul(self(hidden, eps)[0], None, eps, gelu)
        x, linear = hidden.residual, self.linear
        rows = linear.rows_for(len(x))
        if linear.rounds(len(x)) and hidden.normed is None and linear.bias is None:
            found = self._rounded(hidden, eps)
            y = linear.product(found.values)
            return rounded_rows.gated(y, found.scales, linear.output_scales)
        if rows is None or hidden.normed is not None or not narrow_rows.suits(linear.weight, True):
            return silu_and_mul(self(hidden, eps)[0], None, eps)
        given = linear.weight, linear.bias
        return rows.linear(x, *given, norm=self.norm, eps=eps, gated=True)

    def norms(self, num_rows: int) -> bool:
        """True if the GEMM kernel for this number of rows also computes the norm."""
        return self.linear.rows_for(num_rows) is not None

    def _rounded(self, hidden: Hidden, eps: float) -> RoundedRows:
        if hidden.rounded is not None:
            return hidden.rounded
        return rounded_rows.rounded(hidden.residual, self.norm, eps)


class Adds(Protocol):
    """A GEMM that adds to the residual."""

    def added(self, x: Tensor, residual: Tensor) -> Tensor:
        """x [T, K] times the weight plus the residual [T, N], which may be overwritten."""


def added(
    linear: Adds,
    x: Tensor,
    residual: Tensor,
    reader: object,
    eps: float,
) -> Hidden:
    """x @ W.T + b plus the residual, which may be overwritten; its norm, too, where both round."""
    if (
        isinstance(linear, NarrowLinear)
        and isinstance(reader, NormedNarrowLinear)
        and linear.rounds(len(x))
        and reader.linear.rounds(len(x))
    ):
        return linear.added_and_rounded(x, residual, reader.norm, eps)
    return Hidden(linear.added(x, residual))


def gemm_of(linear: Linear) -> FusedLinear | NarrowLinear:
    """The layer's GEMM; takes over its weight."""
    weight = _narrow(linear)
    if weight is None:
        return FusedLinear.of(linear)
    return NarrowLinear.of(weight, linear.bias, linear.dtype)


def multiply_narrow(linear: Linear) -> None:
    """Has the layer computed by these kernels, if its weight is in few bits."""
    weight = _narrow(linear)
    if weight is not None:
        linear.multiply_by(NarrowLinear.of(weight, linear.bias, linear.dtype))


def normed_gemm_of(norm: RMSNorm, linear: Linear) -> NormedLinear | NormedNarrowLinear:
    """The GEMM of normed rows; takes over the layer's weight."""
    weight = _narrow(linear)
    if weight is None:
        return NormedLinear.of(norm, linear)
    gemm = NarrowLinear.of(weight, linear.bias, linear.dtype)
    return NormedNarrowLinear(gemm, norm.weight.to(linear.dtype))


def _multiplies_in_8_bits(weight: NarrowWeight) -> bool:
    """True if the library multiplies the weight as it is, with rows in 8 bits."""
    if not weight.rounds_rows or not weight.data.is_cuda:
        return False
    suits = all(size % _LIBRARY_MULTIPLE == 0 for size in weight.shape)
    capability = torch.cuda.get_device_capability(weight.data.device)
    return suits and capability >= rounded_rows.FLOAT8_CAPABILITY


def _narrow(linear: Linear) -> NarrowWeight | None:
    """The weight in few bits; None: it has float numbers, perhaps since now."""
    stored = linear.take_narrow()
    if stored is None:
        return None
    weight = NarrowWeight.of(stored)
    if weight is None:
        wide = stored.dequantized(linear.dtype)
        log.warning(
            "quantization: a weight %s is kept as float numbers, %.1f MiB: its groups are no tiles",
            list(stored.shape),
            wide.nbytes / 2**20,
        )
        linear.give(wide)
    return weight
