"""An MLP and experts that feed a token forward next to each other.

The MLP reads what its layer has normed; the router and the experts read the residual, each with a
norm of its own. Both outputs are normed and added.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import reference
from worker_svc.models.experts import ExpertForm, Experts
from worker_svc.models.layers import MLP, Destinations, RMSNorm
from worker_svc.models.spec import MlpAndExpertsSpec, TensorNames
from worker_svc.parallel.group import Group


class MlpAndExperts:
    """Stands where a layer has an `MLP`, but for the residual that it reads, too."""

    def __init__(
        self,
        hidden: int,
        spec: MlpAndExpertsSpec,
        eps: float,
        dtype: torch.dtype,
        device: torch.device,
        group: Group,
        form: ExpertForm = ExpertForm.NUMBERS,
    ) -> None:
        """`group` are the ranks that divide it."""
        self._group, self._eps = group, eps
        self._mlp = MLP(hidden, spec.mlp, dtype, device)
        self._experts = Experts(hidden, spec.experts, dtype, device, form)
        norms = (RMSNorm(hidden, eps, dtype, device) for _ in range(3))
        self._mlp_norm, self._experts_input_norm, self._experts_norm = norms
        # Routing is computed in float32: see `Experts`.
        num_experts = spec.experts.router.num_experts
        self._router_norm = torch.empty(hidden, dtype=torch.float32, device=device)
        self._expert_scales = torch.empty(num_experts, dtype=torch.float32, device=device)

    @property
    def norms(self) -> tuple[RMSNorm, ...]:
        """All norms that have a weight of the model's type."""
        return self._mlp_norm, self._experts_input_norm, self._experts_norm

    def destinations(self, prefix: str, names: TensorNames) -> Destinations:
        """`prefix` is that of the layer's MLP; the experts are parts of the layer."""
        layer = prefix.rpartition(".")[0]
        yield from self._mlp.destinations(prefix, names)
        yield from self._experts.destinations(layer, names)
        yield f"{layer}.router.scale", self._router_norm
        yield f"{layer}.router.per_expert_scale", self._expert_scales
        yield from self._mlp_norm.destinations(f"{layer}.post_feedforward_layernorm_1")
        yield from self._experts_input_norm.destinations(f"{layer}.pre_feedforward_layernorm_2")
        yield from self._experts_norm.destinations(f"{layer}.post_feedforward_layernorm_2")

    def drop_output_bias(self) -> None:
        """Drops the biases; called on all ranks but one, since the ranks' outputs are summed."""
        self._mlp.drop_output_bias()
        self._experts.drop_output_bias()

    def pack(self) -> None:
        """Once, when all weights are filled."""
        self._mlp.pack()
        self._experts.pack()
        self._router_norm *= len(self._router_norm) ** -0.5

    def __call__(self, hidden: Tensor, residual: Tensor) -> Tensor:
        """The input of the MLP and the residual, [T, hidden] each -> [T, hidden], on all ranks."""
        of_mlp = self._mlp_norm(self._group.all_reduce(self._mlp(hidden)))
        normed = reference.rms_norm(residual.float(), self._router_norm, self._eps)
        weights, chosen = self._experts.choose(F.linear(normed, self._experts.router.float()))
        of_experts = self._experts.feed(
            self._experts_input_norm(residual), weights * self._expert_scales[chosen], chosen
        )
        return of_mlp + self._experts_norm(self._group.all_reduce(of_experts))
