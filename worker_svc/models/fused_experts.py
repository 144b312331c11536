"""Experts on CUDA: routing, and the products of each row's experts, without a wait for the host.

`kernels.experts.few_rows` computes a few rows, of which each has other experts, as a rule, and
`kernels.cluster.expert_rows` those of weights in few bits; `kernels.experts.grouped_linear` more.
It knows neither the residual's place in a layer nor ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.cluster.expert_rows import FewRowExperts
from kernels.expert_clamp import Clamp
from kernels.experts import few_rows
from kernels.experts.grouped_linear import combined, grouped_linear
from kernels.experts.router import Router, Routing, route
from kernels.experts.weights import ExpertWeights
from worker_svc.config import kernel_cache
from worker_svc.models.experts import Experts
from worker_svc.models.fused_gemms import Hidden
from worker_svc.models.layers import ACTS, RMSNorm
from worker_svc.models.spec import Activation


@dataclass(frozen=True, slots=True)
class FusedExperts:
    """A norm, a router and experts."""

    norm: Tensor  # [h]
    router: Router
    gate_up: ExpertWeights  # [E, 2I, h]
    down: ExpertWeights  # [E, h, I]
    clamp: Clamp | None = None  # of gate and up; None: silu(gate) * up
    # Of the first product as a whole, in place of these two; None: they are a part of its kernel.
    act: Callable[[Tensor], Tensor] | None = None
    few: FewRowExperts | None = None  # for as many rows as these serve, instead of all others

    @classmethod
    def of(cls, norm: RMSNorm, experts: Experts) -> "FusedExperts":
        """Takes over the weights. Raises ValueError if some are not numbers."""
        rule, shared, activation = experts.spec.router, experts.spec.shared, experts.spec.activation
        act = None if activation is Activation.SILU else ACTS[activation]
        router = Router(
            experts.router.to(experts.dtype),
            rule.top_k,
            rule.renormalizes,
            experts.bias,
            rule.is_sigmoid,
            rule.scale,
            0 if shared is None else shared.count,
            shared is not None and shared.is_gated,
            experts.logit_bias,
            rule.epsilon,
            rule.num_groups,
            rule.kept_groups,
        )
        gate_up, down = experts.stacked()
        gate_up.require_numbers()
        down.require_numbers()
        few = None
        if act is None and experts.dtype == torch.bfloat16:
            few = FewRowExperts.of(gate_up, down, router.per_row, kernel_cache() / "cluster")
        return cls(norm.weight, router, gate_up, down, experts.spec.clamp, act, few)

    def norms(self, num_rows: int) -> bool:
        """False: a norm that is already computed is read."""
        return False

    def __call__(self, hidden: Hidden, eps: float, residual: Tensor | None) -> Tensor:
        """The weighted sum of the experts of each row's norm, plus the residual: [T, h]."""
        is_normed = hidden.normed is not None
        x = hidden.residual if hidden.normed is None else hidden.normed
        norm = None if is_normed else self.norm
        normed, routing = route(x, self.router, norm, eps)
        return self.products(normed, routing, residual)

    def products(self, normed: Tensor, routing: Routing, residual: Tensor | None) -> Tensor:
        """The weighted sum of each row's experts, by the kernels quickest for so many rows."""
        if self.few is not None and len(normed) <= self.few.most_rows:
            inner = self.few.of_gate_up.gated(normed, self.gate_up, routing, self.clamp)
            return self.few.of_down.summed(inner, self.down, routing, residual)
        are_few = few_rows.pays(len(normed), self.gate_up)
        inner = self._inner(normed, routing, are_few=are_few)
        if are_few:
            return few_rows.summed(inner, self.down, routing, residual)
        return combined(grouped_linear(inner, self.down, routing), routing, residual)

    def _inner(self, normed: Tensor, routing: Routing, *, are_few: bool) -> Tensor:
        """The activation of each pair's first product, [T * per_row, I]."""
        if self.act is not None:
            return self.act(grouped_linear(normed, self.gate_up, routing))
        if are_few:
            return few_rows.gated(normed, self.gate_up, routing, self.clamp)
        return grouped_linear(normed, self.gate_up, routing, gated=True, clamp=self.clamp)
