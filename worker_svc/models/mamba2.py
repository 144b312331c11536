"""A layer of Mamba-2, which mixes tokens by a recurrent state in place of attention."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.recurrent import selective_scan
from kernels.recurrent.segments import Segments
from kernels.recurrent.selective_scan import HeadParameters, ScanHeads
from worker_svc.models.convolution import Convolution
from worker_svc.models.layers import Destinations, whole
from worker_svc.models.linear import Linear
from worker_svc.models.spec import CONV, RECURRENT, Mamba2Spec
from worker_svc.states.in_place import InPlaceStep
from worker_svc.states.step import States, StateStep


class Mamba2:
    """Input projection, convolution, scan, gated norm, output projection."""

    def __init__(
        self, hidden: int, spec: Mamba2Spec, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._spec = spec
        inner, channels, heads = spec.inner_size, spec.num_channels, spec.num_heads
        self._in = Linear.empty(
            hidden, inner + channels + heads, bias=spec.bias, dtype=dtype, device=device
        )
        self._out = Linear.empty(inner, hidden, bias=spec.bias, dtype=dtype, device=device)
        self._conv = Convolution(
            channels, spec.width, bias=spec.conv_bias, dtype=dtype, device=device
        )
        self._norm = torch.empty(inner, dtype=dtype, device=device)
        # Computed in float32, whatever type the checkpoint has.
        self._decay_log, self._step_bias, self._skip = (
            torch.empty(heads, dtype=torch.float32, device=device) for _ in range(3)
        )

    def destinations(self, prefix: str) -> Destinations:
        yield from whole(f"{prefix}.in_proj", self._in)
        yield from self._conv.destinations(f"{prefix}.conv1d")
        yield f"{prefix}.A_log", self._decay_log
        yield f"{prefix}.dt_bias", self._step_bias
        yield f"{prefix}.D", self._skip
        yield f"{prefix}.norm.weight", self._norm
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
        self._norm = self._norm.to(dtype)
        spec = self._spec
        self._heads = ScanHeads(
            spec.num_heads,
            spec.head_dim,
            spec.num_groups,
            spec.state_size,
            HeadParameters(-torch.exp(self._decay_log), self._skip),
            self._step_bias,
        )

    def __call__(self, hidden: Tensor, step: StateStep | InPlaceStep, layer: int) -> Tensor:
        """Hidden states [T, hidden] -> [T, hidden]; updates the states of the step's sequences."""
        spec, eps = self._spec, self._spec.norm_eps
        sizes = [spec.inner_size, spec.num_channels, spec.num_heads]
        gate, channels, dt = torch.split(self._in(hidden), sizes, dim=-1)
        if isinstance(step, InPlaceStep):
            return self._out(self._in_place(gate, channels, dt, step, layer))
        y = step.run(layer, self._update, (channels, dt))  # [T, I]
        return self._out(selective_scan.gated_rms_norm(y, gate, self._norm, spec.num_groups, eps))

    def _update(self, inputs: tuple[Tensor, ...], states: States) -> tuple[Tensor, States]:
        """Channels [B, N, C] and steps [B, N, H] -> outputs [B, N, I], and states after them."""
        spec, (channels, dt) = self._spec, inputs
        mixed, last = self._conv(channels, states[CONV])
        of_groups = spec.num_groups * spec.state_size
        sizes = [spec.inner_size, of_groups, of_groups]
        x, b, c = torch.split(F.silu(mixed), sizes, dim=-1)
        y, recurrent = selective_scan.selective_scan(
            x.view(*x.shape[:-1], spec.num_heads, spec.head_dim),
            F.softplus(dt.float() + self._step_bias),
            b.view(*b.shape[:-1], spec.num_groups, spec.state_size),
            c.view(*c.shape[:-1], spec.num_groups, spec.state_size),
            self._heads.parameters,
            states[RECURRENT],
        )
        return y.flatten(-2), {CONV: last, RECURRENT: recurrent}

    def _in_place(
        self, gate: Tensor, channels: Tensor, dt: Tensor, step: InPlaceStep, layer: int
    ) -> Tensor:
        """The normed outputs [T, I] by kernels that update states where they lie."""
        from kernels.recurrent.gated_norm import gated_rms_norm  # noqa: PLC0415 - needs Triton
        from kernels.recurrent.mamba2 import update_mamba2  # noqa: PLC0415

        spec, states = self._spec, step.rows(layer)

        def update(waves: Sequence[Segments]) -> Tensor:
            mixed = self._conv.in_place(channels, states[CONV], waves)
            return update_mamba2(mixed, dt, self._heads, states[RECURRENT], waves)

        y = step.run(update)
        groups, eps = spec.num_groups, spec.norm_eps
        return gated_rms_norm(y, gate, self._norm, groups, eps, gate_first=True)
