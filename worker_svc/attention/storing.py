"""Attention by the kernels of CUDA, with the keys and values of a step stored before.

Nothing waits for the device, so that graphs can record it.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from kernels.attention.gate import gated
from kernels.attention.latent_rope import rotate_write_latents
from kernels.attention.rope import norm_rope_write_kv
from kernels.attention.write_kv import write_kv
from kernels.attention_kind import AttentionKind
from kernels.norm.rms_norm import rms_norm
from worker_svc.attention.backend import AttentionChoice
from worker_svc.attention.call import AttentionCall, LatentInputs
from worker_svc.attention.torch_backend import AttentionStep


class StoringAttention:
    """Stores and attends, by the backends that are chosen for a layer's kind."""

    def __init__(self, choice_of: Callable[[AttentionKind], AttentionChoice]) -> None:
        self._choice_of = choice_of

    def attend(self, call: AttentionCall) -> Tensor:
        """The call's attention [T, H, Dv]."""
        if call.k is not None:
            assert call.v is not None  # keys that hold their values are stored before
            kv, k, v = call.kv, call.k.contiguous(), call.v.contiguous()
            write_kv(k, v, kv.k, kv.v, call.batch.slot_mapping)
        attended = replace(call, q=call.q.contiguous(), k=None, v=None)
        return self._choice_of(call.kind).attend(attended)


class KernelStep(AttentionStep):
    """One step's attention with norms, rotation and storing in one kernel, too.

    Heads of keys and values have one size, for which the kernels have tiles.
    """

    def __call__(
        self,
        qkv: Tensor,
        qk_norm: Tensor | None,
        eps: float,
        layer: int,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Norms, rotates, stores and attends: [T, (H + 2 Hkv) D] -> [T, H D]."""
        kv, table = self._kv_cache.of_layer(layer), self._parts.ropes.layer(layer)
        batch, first_key = self._batch.of_group(kv.group), self._parts.heads[layer].num_heads
        q_norm, k_norm = (None, None) if qk_norm is None else (qk_norm[0], qk_norm[first_key])
        q = norm_rope_write_kv(
            qkv, self._positions, table, kv.k, kv.v, batch.slot_mapping, q_norm, k_norm, eps,
            kv_scales=kv.scales, key_offsets=kv.key_offsets,
        )  # fmt: skip
        call = AttentionCall(q, kv, batch, self._parts.kinds[layer], sinks=sinks)
        return self._attention.attend(call).flatten(1)

    def over_latents(self, inputs: LatentInputs, layer: int) -> Tensor:
        """Norms, rotates, stores and attends: the weighted sums of values [T, H, V]."""
        kv, table = self._kv_cache.of_layer(layer), self._parts.ropes.layer(layer)
        batch, (keys, values) = self._batch.of_group(kv.group), inputs.weights
        num_heads, nope, latent = keys.shape
        queries = rotate_write_latents(
            inputs.q, inputs.kv, self._positions, table, inputs.norm, inputs.eps, kv.k,
            batch.slot_mapping, is_interleaved=inputs.is_interleaved,
        )  # fmt: skip
        by_head = queries[..., :latent].transpose(0, 1)  # [H, T, R]
        torch.bmm(inputs.q[..., :nope].transpose(0, 1), keys, out=by_head)
        call = AttentionCall(queries, kv, batch, self._parts.kinds[layer])
        attended = self._attention.attend(call)  # [T, H, R]
        out = attended.new_empty((len(attended), num_heads, values.shape[1]))
        torch.bmm(attended.transpose(0, 1), values.transpose(1, 2), out=out.transpose(0, 1))
        return out

    def normed(self, x: Tensor, norm: Tensor, eps: float) -> Tensor:
        """The RMS norm of rows of x with a weight."""
        return rms_norm(x, norm, eps)

    def gated(self, x: Tensor, gate: Tensor) -> Tensor:
        """x times the sigmoid of its gates, [T, N] each."""
        return gated(x, gate)
