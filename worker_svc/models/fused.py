"""The decoder's layers on CUDA: the same weights in as few kernels as the number of rows allows.

The residual stream is one tensor that every product adds to. A product over a handful of rows takes
its norm, its activation and its residual into one kernel; with more rows the library multiplies and
the neighbours are kernels of their own. Knows no requests and no sampling.
"""

import copy
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import linear as small_linear
from kernels.all_reduce import TableRows, all_reduce, receive
from kernels.inboxes import Inboxes
from kernels.rms_norm import add_rms_norm, rms_norm
from kernels.rope import norm_rope_write_kv
from kernels.silu_and_mul import silu_and_mul
from worker_svc.attention import AttentionBatch, HeadLayout
from worker_svc.attention_backend import AttentionChoice
from worker_svc.embedding import Embedding
from worker_svc.kv_cache import KVCache
from worker_svc.layers import MLP, Attention, RMSNorm
from worker_svc.linear import Linear
from worker_svc.parallel import Group
from worker_svc.peer_memory import Slot
from worker_svc.triton_attention import TritonAttention


@dataclass(frozen=True, slots=True)
class Hidden:
    """The residual stream [T, hidden], and its norm where that was made on the way."""

    residual: Tensor
    normed: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Product:
    """A weight [N, K] with its bias [N]."""

    weight: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, linear: Linear) -> "Product":
        return cls(linear.weight, linear.bias)

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, K] -> [T, N]."""
        if self._pays(x):
            return small_linear.linear(x, self.weight, self.bias)
        return F.linear(x, self.weight, self.bias)

    def normed(self, hidden: Hidden, norm: Tensor, eps: float) -> Tensor:
        """The product of the hidden states' norm."""
        x = hidden.residual
        if self._pays(x):
            return small_linear.linear(x, self.weight, self.bias, norm_weight=norm, eps=eps)
        normed = rms_norm(x, norm, eps) if hidden.normed is None else hidden.normed
        return F.linear(normed, self.weight, self.bias)

    def gated(self, hidden: Hidden, norm: Tensor, eps: float) -> Tensor:
        """silu(gate) * up, the halves of the product of the norm: [T, N / 2]."""
        x = hidden.residual
        if self.bias is None and self._pays(x):
            return small_linear.linear(x, self.weight, norm_weight=norm, eps=eps, gated=True)
        return silu_and_mul(self.normed(hidden, norm, eps))

    def added(self, x: Tensor, residual: Tensor) -> Tensor:
        """The product plus the residual [T, N], which it may overwrite."""
        if self._pays(x):
            return small_linear.linear(x, self.weight, self.bias, residual=residual)
        if self.bias is not None:
            residual += self.bias
        return residual.addmm_(x, self.weight.t())

    def summed(
        self,
        x: Tensor,
        inboxes: Inboxes,
        slot: Slot,
        residual: Tensor,
        norm: Tensor | None,
        eps: float,
    ) -> tuple[Tensor, Tensor | None]:
        """The product, summed over the ranks, plus the residual, and the norm of that."""
        if self._pays(x):
            part = small_linear.linear(x, self.weight, self.bias, inboxes=inboxes, slot=slot)
            return receive(part, inboxes, slot, residual, norm, eps)
        return all_reduce(self(x), inboxes, slot, residual, norm, eps)

    def norms(self, num_rows: int) -> bool:
        """Whether the product of so many rows makes their norm itself, at no cost."""
        return small_linear.pays(num_rows, *self.weight.shape)

    def _pays(self, x: Tensor) -> bool:
        return small_linear.pays(x.shape[0], *self.weight.shape)


@dataclass(frozen=True, slots=True)
class FusedLayer:
    """The weights of one decoder layer."""

    input_norm: Tensor  # [hidden]
    qkv: Product
    q_norm: Tensor | None  # [D], with k_norm: both or neither
    k_norm: Tensor | None
    o: Product
    post_norm: Tensor  # [hidden]
    gate_up: Product
    down: Product

    @classmethod
    def of(
        cls, input_norm: RMSNorm, attention: Attention, post_norm: RMSNorm, mlp: MLP
    ) -> "FusedLayer":
        qkv, o = map(Product.of, attention.products)
        gate_up, down = map(Product.of, mlp.products)
        q_norm, k_norm = attention.qk_norms or (None, None)
        return cls(input_norm.weight, qkv, q_norm, k_norm, o, post_norm.weight, gate_up, down)


class FusedDecoder:
    """All layers, the norm behind them and the head."""

    def __init__(
        self,
        embedding: Embedding,
        layers: list[FusedLayer],
        final_norm: Tensor,
        head: Tensor,
        eps: float,
        heads: HeadLayout,
        cos_sin: Tensor,
        group: Group,
    ) -> None:
        self._embedding = embedding
        self._layers = layers
        self._group = group
        self._final_norm = final_norm
        self._head = Product(head, None)
        self._eps = eps
        self._cos_sin = cos_sin
        self.triton = TritonAttention(heads, head)
        # May be replaced until the first graph is captured.
        self.attention = AttentionChoice(self.triton, self.triton)

    def forward(
        self, token_ids: Tensor, positions: Tensor, kv_cache: KVCache, batch: AttentionBatch
    ) -> Tensor:
        """Token ids [T] -> hidden states [T, hidden], normed."""
        eps = self._eps
        hidden = self._embed(token_ids)
        for index, layer in enumerate(self._layers):
            qkv = layer.qkv.normed(hidden, layer.input_norm, eps)  # [T, (H + 2 Hkv) D]
            k_cache, v_cache = kv_cache.layer(index)
            q = norm_rope_write_kv(
                qkv, positions, self._cos_sin, k_cache, v_cache, batch.slot_mapping,
                layer.q_norm, layer.k_norm, eps,
            )  # fmt: skip
            attended = self._attend(q, k_cache, v_cache, batch).flatten(1)  # [T, H D]
            hidden = self._add(
                layer.o, attended, hidden, Slot.ATTENTION, layer.post_norm, layer.gate_up
            )
            inner = layer.gate_up.gated(hidden, layer.post_norm, eps)  # [T, I]
            hidden = self._add(layer.down, inner, hidden, Slot.MLP, *self._behind(index))
        if hidden.normed is not None:
            return hidden.normed
        return rms_norm(hidden.residual, self._final_norm, eps)

    def shortened(self, num_layers: int) -> "FusedDecoder":
        """The first layers alone, for rehearsals: the kernels of all of them, and no sense."""
        short = copy.copy(self)
        short._layers = self._layers[:num_layers]
        return short

    def head(self, hidden: Tensor) -> Tensor:
        """Hidden states [R, hidden] -> logits [R, N] of this rank's tokens, in the model's type."""
        return self._head(hidden)

    def _embed(self, token_ids: Tensor) -> Hidden:
        table = self._embedding.table
        num_bytes = len(token_ids) * table.shape[1] * table.element_size()
        inboxes = self._group.inboxes_for(num_bytes)
        if inboxes is None:
            return Hidden(self._embedding(token_ids))
        rows = TableRows(table, token_ids, self._embedding.first_token)
        norm = self._wanted(*self._behind(-1), len(token_ids))
        return Hidden(*all_reduce(rows, inboxes, Slot.EMBEDDING, None, norm, self._eps))

    def _behind(self, index: int) -> tuple[Tensor, Product | None]:
        """The norm behind a layer, or with -1 behind the embedding, and the product of it."""
        if index + 1 == len(self._layers):
            return self._final_norm, None
        return self._layers[index + 1].input_norm, self._layers[index + 1].qkv

    def _add(
        self,
        product: Product,
        x: Tensor,
        hidden: Hidden,
        slot: Slot,
        norm: Tensor,
        reader: Product | None,
    ) -> Hidden:
        """The product, summed over the ranks, plus the residual, which it may overwrite.

        With its norm, where that comes at no cost and the reader does not make it itself.
        """
        residual = hidden.residual
        if self._group.size == 1:
            return Hidden(product.added(x, residual))
        inboxes = self._group.inboxes_for(residual.nbytes)
        weight = self._wanted(norm, reader, len(residual))
        if inboxes is None:
            total = self._group.all_reduce(product(x))
            if weight is None:
                return Hidden(residual.add_(total))
            normed, total = add_rms_norm(total, residual, weight, self._eps)
            return Hidden(total, normed)
        return Hidden(*product.summed(x, inboxes, slot, residual, weight, self._eps))

    def _wanted(self, norm: Tensor, reader: Product | None, num_rows: int) -> Tensor | None:
        """The norm, unless its reader makes it itself."""
        return None if reader is not None and reader.norms(num_rows) else norm

    def _attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: AttentionBatch) -> Tensor:
        if batch.parts is None:
            return self._attend_part(q, k_cache, v_cache, batch)
        out = torch.empty_like(q)
        decodes, prompts = batch.parts
        n = len(decodes.context_lens)
        self._attend_part(q[:n], k_cache, v_cache, decodes, out[:n])
        self._attend_part(q[n:], k_cache, v_cache, prompts, out[n:])
        return out

    def _attend_part(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: AttentionBatch,
        out: Tensor | None = None,
    ) -> Tensor:
        if batch.is_decode:
            return self.attention.decode.decode(q, k_cache, v_cache, batch, out)
        return self.attention.prefill.prefill(q, k_cache, v_cache, batch, out)
