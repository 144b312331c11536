"""Mixture of experts: a router, and MLPs of which it chooses some for each token.

It owns the weights and their names in a checkpoint; which tokens a step has it does not know. Each
expert is two linear layers; the float numbers of all are two tensors, as the kernels of CUDA read
them.
"""

import logging

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import reference
from kernels.experts.weights import ExpertWeights, serves_float8
from kernels.quantized.scaled import ScaledWeight
from worker_svc.models.layers import Destinations, parts, whole
from worker_svc.models.linear import Linear
from worker_svc.models.spec import MoeSpec, TensorNames

log = logging.getLogger(__name__)


class Experts:
    """A router and experts; stands where a layer has an `MLP`."""

    def __init__(
        self,
        hidden: int,
        spec: MoeSpec,
        dtype: torch.dtype,
        device: torch.device,
        *,
        is_quantized: bool = False,
    ) -> None:
        """The experts of a quantized model take no memory before they are filled."""
        num_experts, self._inner = spec.num_experts, spec.intermediate_size
        self.spec = spec
        # Routing is computed in float32. A GPU reads the weight at each step, so there it has the
        # checkpoint's type.
        router_dtype = torch.float32 if device.type == "cpu" else dtype
        self.router = torch.empty((num_experts, hidden), dtype=router_dtype, device=device)
        gate_up, down = (2 * self._inner, hidden), (hidden, self._inner)
        self._gate_up = _Stack(num_experts, gate_up, dtype, device, is_empty=is_quantized)
        self._down = _Stack(num_experts, down, dtype, device, is_empty=is_quantized)

    def destinations(self, prefix: str, names: TensorNames) -> Destinations:
        yield f"{prefix}.{names.router}.weight", self.router
        sizes = {names.expert_gate: self._inner, names.expert_up: self._inner}
        experts = zip(self._gate_up.linears, self._down.linears, strict=True)
        for index, (gate_up, down) in enumerate(experts):
            expert = f"{prefix}.{names.experts}.{index}"
            yield from parts(expert, sizes, gate_up)
            yield from whole(f"{expert}.{names.expert_down}", down)

    def pack(self) -> None:
        """Once, when all weights are filled."""
        self._gate_up.pack()
        self._down.pack()

    def stacked(self) -> tuple[ExpertWeights, ExpertWeights]:
        """Gives away the weights [E, 2I, hidden] and [E, hidden, I]."""
        return self._gate_up.stacked(), self._down.stacked()

    def __call__(self, hidden: Tensor) -> Tensor:
        """Hidden states [T, hidden] -> the weighted sum of the outputs of each one's experts."""
        logits = F.linear(hidden.float(), self.router.float())
        spec = self.spec
        weights, chosen = reference.choose_experts(logits, spec.top_k, spec.renormalizes)
        gate_ups, downs = self._gate_up.linears, self._down.linears
        return reference.feed_experts(hidden, weights, chosen, gate_ups, downs)


class _Stack:
    """A linear layer of each expert."""

    def __init__(
        self,
        num_experts: int,
        shape: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
        *,
        is_empty: bool,
    ) -> None:
        outputs, inputs = shape
        self._values: Tensor | None = None  # [E, N, K]; None: each layer has its own weight
        if is_empty:
            self.linears = [
                Linear.empty(inputs, outputs, bias=False, dtype=dtype, device=device)
                for _ in range(num_experts)
            ]
            return
        self._values = torch.empty((num_experts, outputs, inputs), dtype=dtype, device=device)
        self.linears = [Linear(weight) for weight in self._values]

    def pack(self) -> None:
        """Moves the weights to the device's layout."""
        for linear in self.linears:
            linear.pack()
        if any(linear.is_packed for linear in self.linears):
            self._values = None

    def stacked(self) -> ExpertWeights:
        """Gives away the weights; in 8 bits, if all are so and the device can widen them."""
        if self._values is not None:
            return ExpertWeights(self._values)
        stored = [linear.take_narrow() for linear in self.linears]
        narrow = [weight for weight in stored if isinstance(weight, ScaledWeight)]
        if len(narrow) == len(stored) and serves_float8(narrow[0].values.device):
            found = ExpertWeights.stacked(narrow)
            if found is not None:
                return found
        dtype = self.linears[0].dtype
        wide = torch.stack(
            [
                linear.weight if weight is None else weight.dequantized(dtype)
                for linear, weight in zip(self.linears, stored, strict=True)
            ]
        )
        log.warning(
            "quantization: experts %s are kept as float numbers, %.3f GiB: no kernel widens them",
            list(wide.shape),
            wide.nbytes / 2**30,
        )
        return ExpertWeights(wide)
