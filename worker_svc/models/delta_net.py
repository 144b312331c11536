"""A layer of a gated delta net, which mixes tokens by a recurrent state in place of attention."""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.recurrent import delta_rule
from kernels.recurrent.segments import Segments
from worker_svc.models.convolution import Convolution
from worker_svc.models.interleaved import Interleaved
from worker_svc.models.layers import Destinations, parts, whole
from worker_svc.models.linear import Linear
from worker_svc.models.spec import CONV, RECURRENT, DeltaNetSpec
from worker_svc.states.in_place import InPlaceStep
from worker_svc.states.step import States, StateStep


class DeltaNet:
    """Input projections, convolution, delta rule, gated norm, output projection."""

    def __init__(
        self, hidden: int, spec: DeltaNetSpec, eps: float, dtype: torch.dtype, device: torch.device
    ) -> None:
        """`eps` is that of the norm of each head's output."""
        self._spec, self._eps = spec, eps
        channels, heads = sum(spec.sections), spec.num_value_heads
        inner = heads * spec.value_dim
        # Queries, keys, values and gates; and of each head both numbers of its step.
        self._in = Linear.empty(hidden, channels + inner, bias=False, dtype=dtype, device=device)
        self._steps = Linear.empty(hidden, 2 * heads, bias=False, dtype=dtype, device=device)
        self._out = Linear.empty(inner, hidden, bias=False, dtype=dtype, device=device)
        self._conv = Convolution(channels, spec.width, bias=False, dtype=dtype, device=device)
        self._norm = torch.empty(spec.value_dim, dtype=dtype, device=device)
        # Computed in float32, whatever type the checkpoint has.
        self._decay_log, self._step_bias = (
            torch.empty(heads, dtype=torch.float32, device=device) for _ in range(2)
        )

    def destinations(self, prefix: str) -> Destinations:
        spec = self._spec
        if spec.is_grouped:
            yield f"{prefix}.in_proj_qkvz.weight", self._by_key_head(self._in, self._sizes)
            yield f"{prefix}.in_proj_ba.weight", self._by_key_head(self._steps, self._step_sizes)
        else:
            in_sizes = {"in_proj_qkv": sum(spec.sections), "in_proj_z": spec.sections[2]}
            yield from parts(prefix, in_sizes, self._in)
            heads = spec.num_value_heads
            yield from parts(prefix, {"in_proj_b": heads, "in_proj_a": heads}, self._steps)
        yield from self._conv.destinations(f"{prefix}.conv1d")
        yield f"{prefix}.A_log", self._decay_log
        yield f"{prefix}.dt_bias", self._step_bias
        yield f"{prefix}.norm.weight", self._norm
        yield from whole(f"{prefix}.out_proj", self._out)

    @property
    def _sizes(self) -> tuple[int, ...]:
        """Rows of queries, keys, values and gates."""
        return *self._spec.sections, self._spec.sections[2]

    @property
    def _step_sizes(self) -> tuple[int, ...]:
        return (self._spec.num_value_heads,) * 2

    def _by_key_head(self, linear: Linear, sizes: tuple[int, ...]) -> Interleaved:
        return Interleaved.of(linear, sizes, self._spec.num_key_heads)

    @property
    def linears(self) -> tuple[Linear, ...]:
        """(input projection, that of the numbers of steps, output projection)."""
        return self._in, self._steps, self._out

    def drop_output_bias(self) -> None:
        """Has none."""

    def add_norm_offset(self) -> None:
        """Its norm has none."""

    def pack(self, dtype: torch.dtype) -> None:
        """Once, when all weights are filled; for activations of this type."""
        for linear in self.linears:
            linear.pack()
        self._conv.pack(dtype)
        spec = self._spec
        self._heads = delta_rule.DeltaHeads(
            spec.num_key_heads,
            spec.num_value_heads,
            spec.key_dim,
            spec.value_dim,
            rates=-self._decay_log.exp(),
            step_bias=self._step_bias,
        )

    def __call__(self, hidden: Tensor, step: StateStep | InPlaceStep, layer: int) -> Tensor:
        """Hidden states [T, hidden] -> the same, with the states of its sequences."""
        channels, gate = self._in(hidden).tensor_split((sum(self._spec.sections),), dim=-1)
        steps = self._steps(hidden)
        if isinstance(step, InPlaceStep):
            return self._out(self._in_place(gate, channels, steps, step, layer))
        b, a = steps.float().chunk(2, dim=-1)  # [T, V] each
        decay_log = self._heads.rates * F.softplus(a + self._step_bias)
        mixed = step.run(layer, self._mix, (channels, decay_log, b.sigmoid()))  # [T, V, dv]
        gated = delta_rule.gated_rms_norm(mixed, gate.view(mixed.shape), self._norm, self._eps)
        return self._out(gated.flatten(1))

    def _mix(
        self, inputs: tuple[Tensor, ...], before: States
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Channels [B, N, C] and steps [B, N, V] -> outputs of heads [B, N, V, dv]."""
        channels, decay_log, beta = inputs
        spec = self._spec
        mixed, conv = self._conv(channels, before[CONV])
        q, k, v = torch.split(F.silu(mixed), list(spec.sections), dim=-1)
        out, recurrent = delta_rule.gated_delta_rule(
            q.view(*q.shape[:2], spec.num_key_heads, spec.key_dim),
            k.view(*k.shape[:2], spec.num_key_heads, spec.key_dim),
            v.view(*v.shape[:2], spec.num_value_heads, spec.value_dim),
            decay_log,
            beta,
            before[RECURRENT],
        )
        return out, {CONV: conv, RECURRENT: recurrent}

    def _in_place(
        self, gate: Tensor, channels: Tensor, steps: Tensor, step: InPlaceStep, layer: int
    ) -> Tensor:
        """The normed outputs [T, V dv] by kernels that update states where they lie."""
        from kernels.recurrent.delta_net import update_delta_net  # noqa: PLC0415 - needs Triton
        from kernels.recurrent.gated_norm import gated_rms_norm  # noqa: PLC0415

        states, heads = step.rows(layer), self._spec.num_value_heads

        def update(waves: Sequence[Segments]) -> Tensor:
            mixed = self._conv.in_place(channels, states[CONV], waves)
            return update_delta_net(mixed, steps, self._heads, states[RECURRENT], waves)

        out = step.run(update)
        return gated_rms_norm(out.flatten(1), gate, self._norm, heads, self._eps, gate_first=False)
