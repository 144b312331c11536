"""Mixture of experts: a router, and MLPs of which it chooses some for each token.

The weights of a layer's experts are two tensors, as the kernels of CUDA read them. It owns the
weights and their names in a checkpoint; which tokens a step has it does not know.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import reference
from worker_svc.models.layers import Destinations, parts, whole
from worker_svc.models.linear import Linear
from worker_svc.models.spec import MoeSpec, TensorNames


class Experts:
    """A router and experts; stands where a layer has an `MLP`."""

    def __init__(
        self, hidden: int, spec: MoeSpec, dtype: torch.dtype, device: torch.device
    ) -> None:
        num_experts, self._inner = spec.num_experts, spec.intermediate_size
        self.spec = spec
        # Routing is computed in float32. A GPU reads the weight at each step, so there it has the
        # checkpoint's type.
        router_dtype = torch.float32 if device.type == "cpu" else dtype
        self.router = torch.empty((num_experts, hidden), dtype=router_dtype, device=device)
        gate_up = torch.empty((num_experts, 2 * self._inner, hidden), dtype=dtype, device=device)
        down = torch.empty((num_experts, hidden, self._inner), dtype=dtype, device=device)
        # [E, 2I, hidden] and [E, hidden, I]; None: each expert has its weights packed.
        self.stacked: tuple[Tensor, Tensor] | None = (gate_up, down)
        self._gate_ups = [Linear(weight) for weight in gate_up]
        self._downs = [Linear(weight) for weight in down]

    def destinations(self, prefix: str, names: TensorNames) -> Destinations:
        yield f"{prefix}.{names.router}.weight", self.router
        sizes = {names.expert_gate: self._inner, names.expert_up: self._inner}
        for index, (gate_up, down) in enumerate(zip(self._gate_ups, self._downs, strict=True)):
            expert = f"{prefix}.{names.experts}.{index}"
            yield from parts(expert, sizes, gate_up)
            yield from whole(f"{expert}.{names.expert_down}", down)

    def pack(self) -> None:
        """Once, when all weights are filled."""
        for linear in (*self._gate_ups, *self._downs):
            linear.pack()
        if any(linear.is_packed for linear in self._gate_ups):
            self.stacked = None

    def __call__(self, hidden: Tensor) -> Tensor:
        """Hidden states [T, hidden] -> the weighted sum of the outputs of each one's experts."""
        logits = F.linear(hidden.float(), self.router.float())
        spec = self.spec
        weights, chosen = reference.choose_experts(logits, spec.top_k, spec.renormalizes)
        return reference.feed_experts(hidden, weights, chosen, self._gate_ups, self._downs)
