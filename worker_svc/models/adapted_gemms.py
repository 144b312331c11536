"""GEMMs of fused layers whose rows may have adapters, around those that compute the model's own.

They stand where the others do in the layers of `AdaptedStack`. What neighbours a GEMM and would
read its outputs (the activation, the all-reduce, the next norm) is then a kernel of its own.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from kernels.comm.all_reduce import all_reduce
from kernels.comm.inboxes import Inboxes
from kernels.norm.silu_and_mul import silu_and_mul
from worker_svc.models.fused_gemms import FusedLinear, Hidden, NormedLinear
from worker_svc.models.stored.narrow_gemms import NarrowLinear, NormedNarrowLinear
from worker_svc.parallel.peer_memory import Slot


class Add(Protocol):
    """Adds what adapters make of the inputs of one linear layer."""

    def __call__(self, x: Tensor, y: Tensor, eps: float | None = None) -> None:
        """y [T, N] += B (A x), in place; with `eps`, x [T, K] is the row before its norm."""


@dataclass(frozen=True, slots=True)
class AdaptedLinear:
    """y = x @ W.T + b, and what adapters add."""

    base: "FusedLinear | NarrowLinear | AdaptedLinear"
    add: Add

    @property
    def bias(self) -> Tensor | None:
        """[N]."""
        return self.base.bias

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, K] -> [T, N]."""
        y = self.base(x)
        self.add(x, y)
        return y

    def added(self, x: Tensor, residual: Tensor) -> Tensor:
        """The same plus the residual [T, N], which may be overwritten."""
        y = self.base.added(x, residual)
        self.add(x, y)
        return y

    def summed(
        self,
        x: Tensor,
        inboxes: Inboxes,
        slot: Slot,
        residual: Tensor,
        norm: Tensor | None,
        eps: float,
    ) -> tuple[Tensor, Tensor | None]:
        """(all-reduce of this rank's part plus the residual, norm of that if `norm` is given)."""
        return all_reduce(self(x), inboxes, slot, residual, norm, eps)


@dataclass(frozen=True, slots=True)
class AdaptedNormedLinear:
    """y = norm(x) @ W.T + b, and what adapters add."""

    base: "NormedLinear | NormedNarrowLinear | AdaptedNormedLinear"
    add: Add  # A has the norm's weight

    @property
    def bias(self) -> Tensor | None:
        """[N]."""
        return self.base.bias

    @property
    def norm(self) -> Tensor:
        """[K]; ones if it is folded into the weight."""
        return self.base.norm

    def __call__(self, hidden: Hidden, eps: float) -> tuple[Tensor, Tensor | None]:
        """(y, rms_source), as of `NormedLinear`: what adapters add waits for its RMS like y."""
        y, rms_of = self.base(hidden, eps)
        self.add(hidden.residual, y, eps if rms_of is None else None)
        return y, rms_of

    def gated(self, hidden: Hidden, eps: float, gelu: bool = False) -> Tensor:
        """silu(gate) * up, or with gelu; they are the halves of y: [T, N / 2]."""
        y, rms_of = self(hidden, eps)
        return silu_and_mul(y, rms_of, eps, gelu)

    def norms(self, num_rows: int) -> bool:
        """True if the GEMM kernel for this number of rows also computes the norm."""
        return self.base.norms(num_rows)
