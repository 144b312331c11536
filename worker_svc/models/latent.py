"""Attention over latents: a token leaves one vector, of which keys and values are made.

The products that make them are applied to queries and outputs instead, so nothing is expanded.
"""

import torch
from torch import Tensor

from kernels import reference
from worker_svc.attention.call import LatentInputs
from worker_svc.attention.torch_backend import AttentionStep
from worker_svc.models.layers import Destinations, RMSNorm, whole
from worker_svc.models.linear import Linear
from worker_svc.models.spec import AttentionSpec, LatentSpec, TensorNames

EPS = 1e-6  # of the norms of latents, whatever the model's own is


class LatentAttention:
    """Projections to latents and heads, rotation, attention over latents, output projection."""

    def __init__(
        self,
        hidden: int,
        spec: AttentionSpec,
        latent: LatentSpec,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Biases are those of the products with hidden states, and of the last one."""
        self._spec, self._latent = spec, latent

        def linear(inputs: int, outputs: int, *, bias: bool = False) -> Linear:
            return Linear.empty(inputs, outputs, bias=bias, dtype=dtype, device=device)

        q_size = spec.num_heads * (latent.nope_dim + latent.rope_dim)
        self._q_a: Linear | None = None
        if latent.query_size is not None:
            self._q_a = linear(hidden, latent.query_size, bias=spec.qkv_bias)
            self._q_norm = RMSNorm(latent.query_size, EPS, dtype, device)
        self._q = linear(hidden if latent.query_size is None else latent.query_size, q_size)
        self._kv_a = linear(hidden, spec.head_dim, bias=spec.qkv_bias)
        self._kv_norm = RMSNorm(latent.size, EPS, dtype, device)
        self._kv_b = linear(latent.size, spec.num_heads * (latent.nope_dim + latent.v_dim))
        self._o = linear(spec.num_heads * latent.v_dim, hidden, bias=spec.o_bias)

    def destinations(self, prefix: str, names: TensorNames) -> Destinations:
        if self._q_a is None:
            yield from whole(f"{prefix}.q_proj", self._q)
        else:
            yield from whole(f"{prefix}.q_a_proj", self._q_a)
            yield from self._q_norm.destinations(f"{prefix}.q_a_layernorm")
            yield from whole(f"{prefix}.q_b_proj", self._q)
        yield from whole(f"{prefix}.kv_a_proj_with_mqa", self._kv_a)
        yield from self._kv_norm.destinations(f"{prefix}.kv_a_layernorm")
        yield from whole(f"{prefix}.kv_b_proj", self._kv_b)
        yield from whole(f"{prefix}.{names.attention_output}", self._o)

    def drop_output_bias(self) -> None:
        """Drops the bias; called on all ranks but one, since the ranks' outputs are summed."""
        self._o.bias = None

    def add_norm_offset(self) -> None:
        """Its norms have none."""

    def pack(self, dtype: torch.dtype) -> None:
        """Once, when all weights are filled; for activations of this type."""
        if self._q_a is not None:
            self._q_a.pack()
            self._q_norm.pack(dtype)
        self._kv_norm.pack(dtype)
        latent = self._latent
        by_head = self._kv_b.weight.to(dtype).view(self._spec.num_heads, -1, latent.size)
        self._weights = reference.LatentWeights(
            by_head[:, : latent.nope_dim], by_head[:, latent.nope_dim :]
        )
        self._kv_b.drop_weight()
        for linear in (self._q, self._kv_a, self._o):
            linear.pack()

    def __call__(self, hidden: Tensor, step: AttentionStep, layer: int) -> Tensor:
        """Hidden states [T, hidden] -> this rank's part of the outputs [T, hidden]."""
        inputs = hidden
        if self._q_a is not None:
            inputs = step.normed(self._q_a(hidden), self._q_norm.weight, self._q_norm.eps)
        q = self._q(inputs).view(len(hidden), self._spec.num_heads, -1)
        norm = self._kv_norm
        projected = LatentInputs(
            q, self._kv_a(hidden), norm.weight, norm.eps, self._weights, self._latent.is_interleaved
        )
        attended = step.over_latents(projected, layer)  # [T, H, V]
        return self._o(attended.flatten(1))
