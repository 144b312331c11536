"""All layers of a decode step of one row, two launches each, by clusters of thread blocks.

An alternative to the kernels of `fused` for the smallest batch, where launches and not bytes take
the time. `tuning.cluster_layers` decides whether a model uses it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels.cluster.decode_layer import DecodedRow, DecodeLayer, ResidualStream
from worker_svc.attention.batch import AttentionBatch
from worker_svc.attention.kv_cache import KVCache
from worker_svc.models.fused_gemms import FusedLinear, NormedLinear


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """The weights of one layer, none of which has a bias."""

    qkv: NormedLinear
    cos_sin: Tensor  # [P, D] float32
    qk_norms: tuple[Tensor, Tensor] | None
    o: FusedLinear
    gate_up: NormedLinear
    down: FusedLinear


@dataclass(frozen=True, slots=True)
class _Buffers:
    """The results of blocks; launches follow each other, so all steps share these buffers."""

    attended: tuple[Tensor, Tensor]  # residual [1, N], partials [P, N]
    fed_forward: tuple[Tensor, Tensor]

    @classmethod
    def of(cls, kernels: DecodeLayer, like: Tensor) -> "_Buffers":
        def pair(num_partials: int) -> tuple[Tensor, Tensor]:
            size = kernels.shape.hidden
            partials = like.new_zeros((num_partials, size), dtype=torch.float32)
            return like.new_zeros((1, size)), partials

        return cls(pair(kernels.shape.num_kv_heads), pair(kernels.tiling.mlp_clusters))


@dataclass(frozen=True, slots=True)
class ClusterLayers:
    """A model's layers, and its final norm [N]."""

    kernels: DecodeLayer
    layers: Sequence[LayerWeights]
    final_norm: Tensor
    buffers: _Buffers

    @classmethod
    def of(
        cls, kernels: DecodeLayer, layers: Sequence[LayerWeights], final_norm: Tensor
    ) -> "ClusterLayers":
        """With buffers on the device of `final_norm`."""
        return cls(kernels, layers, final_norm, _Buffers.of(kernels, final_norm))

    def shortened(self, num_layers: int) -> "ClusterLayers":
        """The first layers alone."""
        return replace(self, layers=self.layers[:num_layers])

    def forward(
        self, residual: Tensor, positions: Tensor, kv_cache: KVCache, batch: AttentionBatch
    ) -> Tensor:
        """The embedding of one token [1, N] -> its normed hidden state [1, N]."""
        row = DecodedRow(positions, batch.slot_mapping, batch.block_tables, batch.context_lens)
        kernels, buffers = self.kernels, self.buffers
        stream = ResidualStream(residual, buffers.fed_forward[1], 0)
        for index, layer in enumerate(self.layers):
            stream = kernels.attend(
                stream, *buffers.attended, layer.qkv.norm, layer.qkv.weight, layer.qk_norms,
                layer.o.weight, layer.cos_sin, row, kv_cache.layer(index),
            )  # fmt: skip
            stream = kernels.feed_forward(
                stream, *buffers.fed_forward, layer.gate_up.norm, layer.gate_up.weight,
                layer.down.weight,
            )  # fmt: skip
        return kernels.normed(stream, self.final_norm, torch.empty_like(residual))
