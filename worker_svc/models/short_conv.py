"""A gated short convolution, as LFM2's layers have it in place of attention."""

from functools import partial

import torch
from torch import Tensor

from worker_svc.models.convolution import Convolution
from worker_svc.models.layers import Destinations, whole
from worker_svc.models.linear import Linear
from worker_svc.models.spec import CONV, ShortConvSpec
from worker_svc.states.in_place import InPlaceStep
from worker_svc.states.step import States, StateStep


class ShortConv:
    """Projections b, c and x of each token, c * conv(b * x), output projection."""

    def __init__(
        self, hidden: int, spec: ShortConvSpec, dtype: torch.dtype, device: torch.device
    ) -> None:
        size = spec.channels
        self._in = Linear.empty(hidden, 3 * size, bias=spec.bias, dtype=dtype, device=device)
        self._out = Linear.empty(size, hidden, bias=spec.bias, dtype=dtype, device=device)
        self._conv = Convolution(size, spec.width, bias=spec.bias, dtype=dtype, device=device)

    def destinations(self, prefix: str) -> Destinations:
        yield from whole(f"{prefix}.in_proj", self._in)
        yield from self._conv.destinations(f"{prefix}.conv")
        yield from whole(f"{prefix}.out_proj", self._out)

    @property
    def linears(self) -> tuple[Linear, ...]:
        """(input projection, output projection)."""
        return self._in, self._out

    def add_norm_offset(self) -> None:
        """Has no such norm."""

    def drop_output_bias(self) -> None:
        """Drops the bias; called on all ranks but one, since the ranks' outputs are summed."""
        self._out.bias = None

    def pack(self, dtype: torch.dtype) -> None:
        """Once, when all weights are filled; for activations of this type."""
        for linear in self.linears:
            linear.pack()
        self._conv.pack(dtype)

    def __call__(self, hidden: Tensor, step: StateStep | InPlaceStep, layer: int) -> Tensor:
        """Hidden states [T, hidden] -> [T, hidden]; updates the states of the step's sequences."""
        inputs = self._in(hidden)
        if isinstance(step, InPlaceStep):
            update = partial(self._conv.in_place, inputs, step.rows(layer)[CONV], gated=True)
            return self._out(step.run(update))
        return self._out(step.run(layer, self._update, (inputs,)))

    def _update(self, inputs: tuple[Tensor, ...], states: States) -> tuple[Tensor, States]:
        """Projections [B, N, 3 C] -> outputs [B, N, C], and the last inputs of the convolution."""
        b, c, x = inputs[0].chunk(3, dim=-1)
        y, last = self._conv(b * x, states[CONV])
        return c * y, {CONV: last}
