"""Inputs of layers apart from the residual: a vector for each token and layer, and where it joins.

The vectors are of a token's id, from a table, and of its embedding, by a product.
"""

import torch
from torch import Tensor

from kernels import reference
from worker_svc.models.embedding import Embedding
from worker_svc.models.layers import Destinations, RMSNorm, whole
from worker_svc.models.linear import Linear
from worker_svc.models.spec import LayerInputsSpec, ModelSpec, TensorNames
from worker_svc.parallel.group import Group


class LayerInputs:
    """The vectors of all layers; every rank has them whole, and a part of the table."""

    def __init__(
        self,
        model: ModelSpec,
        spec: LayerInputsSpec,
        dtype: torch.dtype,
        device: torch.device,
        group: Group,
    ) -> None:
        """`model` and `spec` have the sizes of one rank."""
        self._spec, self._group = spec, group
        width = model.num_layers * spec.size
        self._table = torch.empty((spec.vocab_size, width), dtype=dtype, device=device)
        self._projection = Linear.empty(
            model.hidden_size, width, bias=False, dtype=dtype, device=device
        )
        self._scale = model.hidden_size**-0.5
        self._norm = RMSNorm(spec.size, model.rms_norm_eps, dtype, device)

    def destinations(self, names: TensorNames) -> Destinations:
        prefix = names.embedding.rpartition(".")[0]
        yield f"{prefix}.embed_tokens_per_layer.weight", self._table
        yield from whole(f"{prefix}.per_layer_model_projection", self._projection)
        yield from self._norm.destinations(f"{prefix}.per_layer_projection_norm")

    def pack(self, dtype: torch.dtype) -> None:
        """Once, when all weights are filled; for activations of this type."""
        first_token = self._group.rank * self._spec.vocab_size
        self._embedding = Embedding(self._table, first_token, self._group, self._spec.size**0.5)
        self._projection.pack()
        self._norm.pack(dtype)

    def __call__(self, token_ids: Tensor, embedded: Tensor) -> Tensor:
        """Token ids [T] and their embeddings [T, hidden] -> inputs [T, L, size]."""
        projected = (self._projection(embedded) * self._scale).unflatten(-1, (-1, self._spec.size))
        of_ids = self._embedding(token_ids).to(embedded.dtype).view_as(projected)
        return (self._norm(projected) + of_ids) * 2**-0.5


class LayerEnd:
    """The last part of a layer: its input is gated and added, and the residual gets a factor."""

    def __init__(
        self,
        model: ModelSpec,
        dtype: torch.dtype,
        device: torch.device,
        *,
        has_factor: bool,
    ) -> None:
        """The input's part is there if the model's layers have inputs."""
        self._factor: Tensor | None = None  # [1]
        if has_factor:
            self._factor = torch.empty(1, dtype=dtype, device=device)
        self._gate: Linear | None = None
        hidden, inputs = model.hidden_size, model.layer_inputs
        if inputs is not None:
            self._gate = Linear.empty(hidden, inputs.size, bias=False, dtype=dtype, device=device)
            self._projection = Linear.empty(
                inputs.size, hidden, bias=False, dtype=dtype, device=device
            )
            self._norm = RMSNorm(hidden, model.rms_norm_eps, dtype, device)

    def destinations(self, prefix: str) -> Destinations:
        if self._factor is not None:
            yield f"{prefix}.layer_scalar", self._factor
        if self._gate is not None:
            yield from whole(f"{prefix}.per_layer_input_gate", self._gate)
            yield from whole(f"{prefix}.per_layer_projection", self._projection)
            yield from self._norm.destinations(f"{prefix}.post_per_layer_input_norm")

    def pack(self, dtype: torch.dtype) -> None:
        """Once, when all weights are filled; for activations of this type."""
        if self._factor is not None:
            self._factor = self._factor.to(dtype)
        if self._gate is not None:
            self._gate.pack()
            self._projection.pack()
            self._norm.pack(dtype)

    def __call__(self, residual: Tensor, inputs: Tensor | None) -> Tensor:
        """The residual [T, hidden] and the layer's inputs [T, size] -> the residual after it."""
        if self._gate is not None:
            assert inputs is not None  # both follow from the model
            gated = reference.gelu_and_mul(torch.cat((self._gate(residual), inputs), dim=-1))
            residual = residual + self._norm(self._projection(gated))
        return residual if self._factor is None else residual * self._factor
