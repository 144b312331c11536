"""Experts on CPU: weights packed for the C kernels, which compute all of a step's rows by expert.

Independent of requests; which experts a row has is chosen here, by the rule of all devices.
"""

from collections.abc import Sequence

from torch import Tensor

from kernels.cpu.library import Library, PackedExperts, PackedLinear
from worker_svc.models.experts import Experts
from worker_svc.models.linear import Linear
from worker_svc.models.packed_linear import packed

ROWS_AT_ONCE = 512  # whose experts' inner states take memory at the same time


class CompiledExperts:
    """The router and the packed experts of a layer."""

    def __init__(self, library: Library, experts: Experts) -> None:
        """Takes the weights of the experts, which cannot be used any more."""
        self._library = library
        self._experts = experts
        gate_ups, downs = experts.moved(_Mover(library))
        self._packed = PackedExperts(gate_ups, downs, experts.spec.clamp)

    def __call__(self, hidden: Tensor, out: Tensor) -> None:
        """Hidden states [T, hidden] -> out, the weighted sum of each one's experts."""
        for begin in range(0, len(hidden), ROWS_AT_ONCE):
            rows = slice(begin, begin + ROWS_AT_ONCE)
            x, to = hidden[rows], out[rows]
            weights, chosen = self._experts.choose(self._library.route(x, self._experts.router))
            self._library.feed_experts(x, weights, chosen, self._packed, to)


class _Mover:
    """Packs weights of experts."""

    def __init__(self, library: Library) -> None:
        self._library = library

    def of_linears(self, linears: Sequence[Linear]) -> list[PackedLinear]:
        stored = [linear.grouped for linear in linears]
        moved = [packed(self._library, linear) for linear in linears]
        if len({one.form for one in moved}) == 1:
            return moved
        # The kernels prepare the rows of all experts alike: integers of several formats, or of some
        # experts alone, become float numbers.
        dtype, pack = self._library.dtype, self._library.pack
        return [
            one if weight is None else pack(weight.dequantized(dtype), linear.bias)
            for one, weight, linear in zip(moved, stored, linears, strict=True)
        ]

    def of_codes(self, codes: Tensor, exponents: Tensor, bias: Tensor | None) -> PackedLinear:
        return self._library.pack_mxfp4(codes, exponents, bias)
