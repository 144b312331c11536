"""GEMMs on CUDA with weights in 4 or 8 bits: in registers for few rows, else made wide first.

They stand where `FusedLinear` and `NormedLinear` stand, with fewer of their neighbours fused.
"""

import logging
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from kernels.comm.all_reduce import all_reduce
from kernels.comm.inboxes import Inboxes
from kernels.norm.rms_norm import rms_norm
from kernels.norm.silu_and_mul import silu_and_mul
from kernels.quantized import linear as kernels
from kernels.quantized.narrow import NarrowWeight
from worker_svc.models.fused_gemms import FusedLinear, Hidden, NormedLinear
from worker_svc.models.layers import RMSNorm
from worker_svc.models.linear import Linear
from worker_svc.parallel.peer_memory import Slot

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NarrowLinear:
    """y = x @ W.T + b, with weight [N, K] and bias [N]."""

    weight: NarrowWeight
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, K] -> [T, N]."""
        if len(x) <= kernels.MAX_ROWS:
            return kernels.linear(x, self.weight, self.bias)
        return F.linear(x, kernels.dequantized(self.weight, x.dtype), self.bias)

    def added(self, x: Tensor, residual: Tensor) -> Tensor:
        """x @ W.T + b plus the residual [T, N], which may be overwritten."""
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


@dataclass(frozen=True, slots=True)
class NormedNarrowLinear:
    """y = norm(x) @ W.T + b; the norm is a kernel of its own."""

    linear: NarrowLinear
    norm: Tensor  # [K]

    @property
    def bias(self) -> Tensor | None:
        """[N]."""
        return self.linear.bias

    def __call__(self, hidden: Hidden, eps: float) -> tuple[Tensor, Tensor | None]:
        """(norm(x) @ W.T + b [T, N], None: nothing is left to divide by)."""
        normed = hidden.normed
        if normed is None:
            normed = rms_norm(hidden.residual, self.norm, eps)
        return self.linear(normed), None

    def gated(self, hidden: Hidden, eps: float) -> Tensor:
        """silu(gate) * up, where gate and up are the halves of norm(x) @ W.T: [T, N / 2]."""
        return silu_and_mul(self(hidden, eps)[0], None, eps)

    def norms(self, num_rows: int) -> bool:
        """Whether the GEMM kernel for this number of rows also computes the norm."""
        return False


def gemm_of(linear: Linear) -> FusedLinear | NarrowLinear:
    """The layer's GEMM; takes over its weight."""
    weight = _narrow(linear)
    return FusedLinear.of(linear) if weight is None else NarrowLinear(weight, linear.bias)


def normed_gemm_of(norm: RMSNorm, linear: Linear) -> NormedLinear | NormedNarrowLinear:
    """The GEMM of normed rows; takes over the layer's weight."""
    weight = _narrow(linear)
    if weight is None:
        return NormedLinear.of(norm, linear)
    return NormedNarrowLinear(NarrowLinear(weight, linear.bias), norm.weight)


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
