"""GEMMs of the residual stream, or of its norm, with one weight; selects a kernel by rows.

`kernels.gemm.linear` computes one row, and a few rows of small weights; `kernels.gemm.tiled_linear`
up to 32 rows; both have neighbouring operations fused. The library computes larger GEMMs. A norm in
front of the library's GEMM has no kernel of its own: the norm's weight is folded into W, and the
kernel after the GEMM divides each row by its RMS.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TypedDict, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.comm.all_reduce import all_reduce, receive
from kernels.comm.inboxes import Inboxes
from kernels.gemm import linear as small_linear
from kernels.gemm import tiled_linear as tiles
from kernels.gemm.cublas_lt import GemmKind, LibraryGemm
from kernels.gemm.tiled_linear import tiled_linear
from kernels.norm.rms_norm import rms_norm
from kernels.norm.silu_and_mul import silu_and_mul
from kernels.quantized.rounded_rows import RoundedRows
from worker_svc.models.layers import RMSNorm
from worker_svc.models.linear import Linear
from worker_svc.parallel.peer_memory import Slot

# Elements of x. Above this, one norm kernel costs less than the readers' own sums of squares.
_MAX_DIVIDED = 3 << 18

P = TypeVar("P", "FusedLinear", "NormedLinear")

# Number of rows to the library's GEMM, where an algorithm is faster than torch's.
TunedGemms = Mapping[int, LibraryGemm]


@dataclass(frozen=True, slots=True)
class Hidden:
    """The residual stream [T, hidden], and its norm if that is already computed."""

    residual: Tensor
    normed: Tensor | None = None
    rounded: RoundedRows | None = None  # the norm in 8 bits, for the GEMM that comes next


@dataclass(frozen=True, slots=True)
class FusedLinear:
    """y = x @ W.T + b, with weight [N, K] and bias [N]."""

    weight: Tensor
    bias: Tensor | None
    gemms: TunedGemms = field(default_factory=dict)
    arrived: Tensor | None = None  # counters of `tiled_linear`; None: not usable

    @classmethod
    def of(cls, linear: Linear) -> "FusedLinear":
        return cls(linear.weight, linear.bias, arrived=_counters(linear.weight, linear.bias))

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, K] -> [T, N]."""
        if _is_by_rows(self, len(x)):
            return small_linear.linear(x, self.weight, self.bias)
        return _multiplied(x, self)

    def added(self, x: Tensor, residual: Tensor) -> Tensor:
        """x @ W.T + b plus the residual [T, N], which may be overwritten."""
        if _is_by_rows(self, len(x)):
            return small_linear.linear(x, self.weight, self.bias, residual=residual)
        if (arrived := tiles.counters_for(self.arrived, len(x))) is not None:
            return tiled_linear(x, self.weight, arrived, residual=residual)
        if self.bias is not None:
            residual += self.bias
        gemm = self.gemms.get(len(x))
        if gemm is not None:
            return gemm(x, self.weight, residual)
        return residual.addmm_(x, self.weight.t())

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
        if _is_by_rows(self, len(x)):
            part = small_linear.linear(x, self.weight, self.bias, inboxes=inboxes, slot=slot)
            return receive(part, inboxes, slot, residual, norm, eps)
        return all_reduce(self(x), inboxes, slot, residual, norm, eps)


class GatedProduct(TypedDict):
    """Arguments of a product of gate and up."""

    gated: bool
    gelu: bool
    eps: float


@dataclass(frozen=True, slots=True)
class NormedLinear:
    """y = norm(x) @ W.T + b, with weight [N, K] and bias [N]."""

    weight: Tensor
    bias: Tensor | None
    norm: Tensor  # [K]; ones if it is folded into `weight`
    is_divisible: bool  # whether y may be divided by the RMS instead of x
    gemms: TunedGemms = field(default_factory=dict)
    arrived: Tensor | None = None  # counters of `tiled_linear`; None: not usable

    @classmethod
    def of(cls, norm: RMSNorm, linear: Linear) -> "NormedLinear":
        """Takes over the linear layer's weight and folds the norm's weight into it if possible."""
        weight, bias = linear.weight, linear.bias
        # With a bias, or values beyond the range of float16, x must be divided before the GEMM.
        if bias is not None or weight.dtype == torch.float16:
            return cls(weight, bias, norm.weight.to(weight.dtype), is_divisible=False)
        ones = weight.new_ones(norm.weight.shape)
        weight.mul_(norm.weight)
        return cls(weight, None, ones, is_divisible=True, arrived=_counters(weight, None))

    def __call__(self, hidden: Hidden, eps: float) -> tuple[Tensor, Tensor | None]:
        """Returns (y, rms_source): y = norm(x) @ W.T [T, N].

        If rms_source is not None, the caller still divides each row of y by the RMS of that row of
        rms_source.
        """
        x = hidden.residual
        if _is_by_rows(self, len(x)):
            y = small_linear.linear(x, self.weight, self.bias, norm_weight=self.norm, eps=eps)
            return y, None
        if hidden.normed is not None:
            return _multiplied(hidden.normed, self), None
        if self.is_divisible and x.numel() <= _MAX_DIVIDED:
            return _multiplied(x, self), x
        return _multiplied(rms_norm(x, self.norm, eps), self), None

    def gated(self, hidden: Hidden, eps: float, gelu: bool = False) -> Tensor:
        """silu(gate) * up, or with gelu; they are the halves of norm(x) @ W.T: [T, N / 2]."""
        x, how = hidden.residual, GatedProduct(gated=True, gelu=gelu, eps=eps)
        if self.bias is None and _is_by_rows(self, len(x)):
            return small_linear.linear(x, self.weight, norm_weight=self.norm, **how)
        if (arrived := tiles.counters_for(self.arrived, len(x))) is not None:
            return tiled_linear(x, self.weight, arrived, divided=True, **how)
        y, rms_of = self(hidden, eps)
        return silu_and_mul(y, rms_of, eps, gelu)

    def norms(self, num_rows: int) -> bool:
        """True if the GEMM kernel for this number of rows also computes the norm."""
        is_tiled = tiles.counters_for(self.arrived, num_rows) is not None
        return is_tiled or _is_by_rows(self, num_rows)


def _is_by_rows(linear: FusedLinear | NormedLinear, num_rows: int) -> bool:
    """True if `kernels.gemm.linear` is used for this number of rows."""
    return small_linear.pays(num_rows, *linear.weight.shape)


def _multiplied(x: Tensor, by: FusedLinear | NormedLinear) -> Tensor:
    """x [T, K] @ W.T -> [T, N] without a norm, for more rows than `kernels.gemm.linear` takes."""
    if (arrived := tiles.counters_for(by.arrived, len(x))) is not None:
        return tiled_linear(x, by.weight, arrived)
    gemm = by.gemms.get(len(x))
    if gemm is None:
        return F.linear(x, by.weight, by.bias)
    return gemm(x, by.weight, x.new_empty((len(x), len(by.weight))))


def is_librarys(num_rows: int, kind: GemmKind) -> bool:
    """True if the library computes GEMMs of this kind with this number of rows."""
    is_tiled = tiles.serves(num_rows) and tiles.suits(kind.n, kind.k, kind.dtype)
    return not is_tiled and not small_linear.pays(num_rows, kind.n, kind.k)


def kind_of(linear: FusedLinear | NormedLinear, adds: bool) -> GemmKind | None:
    """The library's kind of GEMM; None with a bias that no residual absorbs, left to torch."""
    if linear.bias is not None and not adds:
        return None
    n, k = linear.weight.shape
    return GemmKind(n, k, linear.weight.dtype, adds)


def with_gemms(linear: P, adds: bool, chosen: Mapping[GemmKind, TunedGemms]) -> P:
    """The same layer with the tuned algorithms of its kind."""
    kind = kind_of(linear, adds)
    return linear if kind is None else replace(linear, gemms=chosen.get(kind, {}))


def _counters(weight: Tensor, bias: Tensor | None) -> Tensor | None:
    return tiles.arrivals(weight) if bias is None and tiles.pays(weight) else None
