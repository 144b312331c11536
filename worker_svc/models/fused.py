"""The decoder's layers on CUDA: the same weights in as few kernels as the number of rows allows.

The residual stream is one tensor that every product adds to. A product over a few dozen rows takes
its norm, its activation and its residual into one kernel. With more rows the library multiplies. A
norm in front of it is then no kernel of its own either: its weight is in the product's, and the
kernel behind the product divides by what is left, one number per row. Knows no requests and no
sampling.
"""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import linear as small_linear
from kernels import tiled_linear as tiles
from kernels.all_reduce import TableRows, all_reduce, receive
from kernels.cublas_lt import LibraryProduct, ProductKind
from kernels.inboxes import Inboxes
from kernels.rms_norm import add_rms_norm, rms_norm
from kernels.rope import norm_rope_write_kv
from kernels.silu_and_mul import silu_and_mul
from kernels.tiled_linear import tiled_linear
from worker_svc.attention import AttentionBatch, HeadLayout
from worker_svc.attention_backend import AttentionChoice
from worker_svc.embedding import Embedding
from worker_svc.kv_cache import KVCache
from worker_svc.layers import MLP, Attention, RMSNorm
from worker_svc.linear import Linear
from worker_svc.parallel import Group
from worker_svc.peer_memory import Slot
from worker_svc.triton_attention import TritonAttention

# With more rows, reading them once more for their norm costs less than each reader's own sum.
_MAX_DIVIDED_ROWS = 512

P = TypeVar("P", "Product", "NormedProduct")

# By the number of rows: the library's product by an algorithm that is quicker than torch's.
Quick = Mapping[int, LibraryProduct]


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
    quick: Quick = field(default_factory=dict)
    arrived: Tensor | None = None  # counters for `tiled_linear`; None: it is not for this weight

    @classmethod
    def of(cls, linear: Linear) -> "Product":
        return cls(linear.weight, linear.bias, arrived=_counters(linear.weight, linear.bias))

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, K] -> [T, N]."""
        if self._pays(x):
            return small_linear.linear(x, self.weight, self.bias)
        if (arrived := tiles.counters_for(self.arrived, len(x))) is not None:
            return tiled_linear(x, self.weight, arrived)
        return _multiplied(x, self.weight, self.bias, self.quick)

    def added(self, x: Tensor, residual: Tensor) -> Tensor:
        """The product plus the residual [T, N], which it may overwrite."""
        if self._pays(x):
            return small_linear.linear(x, self.weight, self.bias, residual=residual)
        if (arrived := tiles.counters_for(self.arrived, len(x))) is not None:
            return tiled_linear(x, self.weight, arrived, residual=residual)
        if self.bias is not None:
            residual += self.bias
        quick = self.quick.get(len(x))
        if quick is not None:
            return quick(x, self.weight, residual)
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

    def _pays(self, x: Tensor) -> bool:
        return small_linear.pays(x.shape[0], *self.weight.shape)


@dataclass(frozen=True, slots=True)
class NormedProduct:
    """A weight [N, K] with its bias [N], for normed rows."""

    weight: Tensor
    bias: Tensor | None
    norm: Tensor  # [K], of ones if the norm's weight has been multiplied into the product's
    is_divisible: bool  # whether the product may be divided by root mean squares in place of x
    quick: Quick = field(default_factory=dict)
    arrived: Tensor | None = None  # counters for `tiled_linear`; None: it is not for this weight

    @classmethod
    def of(cls, norm: RMSNorm, linear: Linear) -> "NormedProduct":
        """Takes the weight over."""
        weight, bias = linear.weight, linear.bias
        # A bias comes behind the division. What float16 cannot hold must be divided first.
        if bias is not None or weight.dtype == torch.float16:
            return cls(weight, bias, norm.weight, is_divisible=False)
        ones = norm.weight.new_ones(norm.weight.shape)
        weight.mul_(norm.weight)
        return cls(weight, None, ones, is_divisible=True, arrived=_counters(weight, None))

    def __call__(self, hidden: Hidden, eps: float) -> tuple[Tensor, Tensor | None]:
        """The product of the norm [T, N], and by whose rows' root mean squares to divide it yet."""
        x = hidden.residual
        if self._pays(len(x)):
            y = small_linear.linear(x, self.weight, self.bias, norm_weight=self.norm, eps=eps)
            return y, None
        if hidden.normed is not None:
            return self._product(hidden.normed), None
        if self.is_divisible and len(x) <= _MAX_DIVIDED_ROWS:
            return self._product(x), x
        return self._product(rms_norm(x, self.norm, eps)), None

    def gated(self, hidden: Hidden, eps: float) -> Tensor:
        """silu(gate) * up, the halves of the product of the norm: [T, N / 2]."""
        x = hidden.residual
        if self.bias is None and self._pays(len(x)):
            return small_linear.linear(x, self.weight, norm_weight=self.norm, eps=eps, gated=True)
        if (arrived := tiles.counters_for(self.arrived, len(x))) is not None:
            return tiled_linear(x, self.weight, arrived, gated=True, divided=True, eps=eps)
        product, rms_of = self(hidden, eps)
        return silu_and_mul(product, rms_of, eps)

    def norms(self, num_rows: int) -> bool:
        """Whether the product of so many rows makes their norm itself, at no cost."""
        is_tiled = tiles.counters_for(self.arrived, num_rows) is not None
        return is_tiled or self._pays(num_rows)

    def _pays(self, num_rows: int) -> bool:
        return small_linear.pays(num_rows, *self.weight.shape)

    def _product(self, x: Tensor) -> Tensor:
        if (arrived := tiles.counters_for(self.arrived, len(x))) is not None:
            return tiled_linear(x, self.weight, arrived)
        return _multiplied(x, self.weight, self.bias, self.quick)


def _multiplied(x: Tensor, weight: Tensor, bias: Tensor | None, quick: Quick) -> Tensor:
    """The library's product: x [T, K] -> [T, N]."""
    product = quick.get(len(x))
    if product is None:
        return F.linear(x, weight, bias)
    return product(x, weight, x.new_empty((len(x), len(weight))))


def _kind(product: Product | NormedProduct, adds: bool) -> ProductKind | None:
    """What the library is asked for; None: a bias comes on top, and torch sees to that."""
    if product.bias is not None and not adds:
        return None
    n, k = product.weight.shape
    return ProductKind(n, k, product.weight.dtype, adds)


def _quickened(product: P, adds: bool, chosen: Mapping[ProductKind, Quick]) -> P:
    kind = _kind(product, adds)
    return product if kind is None else replace(product, quick=chosen.get(kind, {}))


def _counters(weight: Tensor, bias: Tensor | None) -> Tensor | None:
    return tiles.arrivals(weight) if bias is None and tiles.pays(weight) else None


@dataclass(frozen=True, slots=True)
class FusedLayer:
    """The weights of one decoder layer."""

    qkv: NormedProduct
    q_norm: Tensor | None  # [D], with k_norm: both or neither
    k_norm: Tensor | None
    o: Product
    gate_up: NormedProduct
    down: Product

    @classmethod
    def of(
        cls, input_norm: RMSNorm, attention: Attention, post_norm: RMSNorm, mlp: MLP
    ) -> "FusedLayer":
        (qkv, o), (gate_up, down) = attention.products, mlp.products
        q_norm, k_norm = attention.qk_norms or (None, None)
        return cls(
            NormedProduct.of(input_norm, qkv),
            q_norm,
            k_norm,
            Product.of(o),
            NormedProduct.of(post_norm, gate_up),
            Product.of(down),
        )

    def weights(self, adds: bool) -> Iterator[tuple[ProductKind, Tensor]]:
        """What the library multiplies with and how; `adds`: whether the residual is added to."""
        products: list[tuple[Product | NormedProduct, bool]] = [
            (self.qkv, False), (self.o, adds), (self.gate_up, False), (self.down, adds),
        ]  # fmt: skip
        for product, is_added in products:
            if (kind := _kind(product, is_added)) is not None:
                yield kind, product.weight

    def quickened(self, adds: bool, chosen: Mapping[ProductKind, Quick]) -> "FusedLayer":
        """The same with products as chosen for the kinds that `weights` names."""
        return replace(
            self,
            qkv=_quickened(self.qkv, False, chosen),
            o=_quickened(self.o, adds, chosen),
            gate_up=_quickened(self.gate_up, False, chosen),
            down=_quickened(self.down, adds, chosen),
        )


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

    def library_weights(self) -> dict[ProductKind, list[Tensor]]:
        """The weights of all layers that the library multiplies with, by kind."""
        found: dict[ProductKind, list[Tensor]] = {}
        for layer in self._layers:
            for kind, weight in layer.weights(adds=self._group.size == 1):
                found.setdefault(kind, []).append(weight)
        return found

    def quicken(self, chosen: Mapping[ProductKind, Quick]) -> None:
        """Multiplies as chosen from now on; to be called before a graph is captured."""
        adds = self._group.size == 1
        self._layers = [layer.quickened(adds, chosen) for layer in self._layers]

    @staticmethod
    def is_librarys(num_rows: int, kind: ProductKind) -> bool:
        """Whether products of so many rows are left to the library."""
        is_tiled = tiles.serves(num_rows) and tiles.suits(kind.n, kind.k, kind.dtype)
        return not is_tiled and not small_linear.pays(num_rows, kind.n, kind.k)

    def forward(
        self, token_ids: Tensor, positions: Tensor, kv_cache: KVCache, batch: AttentionBatch
    ) -> Tensor:
        """Token ids [T] -> hidden states [T, hidden], normed."""
        eps = self._eps
        hidden = self._embed(token_ids)
        for index, layer in enumerate(self._layers):
            qkv, rms_of = layer.qkv(hidden, eps)  # [T, (H + 2 Hkv) D]
            k_cache, v_cache = kv_cache.layer(index)
            q = norm_rope_write_kv(
                qkv, positions, self._cos_sin, k_cache, v_cache, batch.slot_mapping,
                layer.q_norm, layer.k_norm, eps, rms_of,
            )  # fmt: skip
            attended = self._attend(q, k_cache, v_cache, batch).flatten(1)  # [T, H D]
            hidden = self._add(layer.o, attended, hidden, Slot.ATTENTION, layer.gate_up)
            inner = layer.gate_up.gated(hidden, eps)  # [T, I]
            hidden = self._add(layer.down, inner, hidden, Slot.MLP, self._behind(index))
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
        norm = self._wanted(self._behind(-1), len(token_ids))
        return Hidden(*all_reduce(rows, inboxes, Slot.EMBEDDING, None, norm, self._eps))

    def _behind(self, index: int) -> NormedProduct | None:
        """The product behind a layer, or with -1 behind the embedding; None: the final norm."""
        return self._layers[index + 1].qkv if index + 1 < len(self._layers) else None

    def _add(
        self,
        product: Product,
        x: Tensor,
        hidden: Hidden,
        slot: Slot,
        reader: NormedProduct | None,
    ) -> Hidden:
        """The product, summed over the ranks, plus the residual, which it may overwrite.

        With its norm, where that comes at no cost and the reader does not make it itself.
        """
        residual = hidden.residual
        if self._group.size == 1:
            return Hidden(product.added(x, residual))
        inboxes = self._group.inboxes_for(residual.nbytes)
        weight = self._wanted(reader, len(residual))
        if inboxes is None:
            total = self._group.all_reduce(product(x))
            if weight is None:
                return Hidden(residual.add_(total))
            normed, total = add_rms_norm(total, residual, weight, self._eps)
            return Hidden(total, normed)
        return Hidden(*product.summed(x, inboxes, slot, residual, weight, self._eps))

    def _wanted(self, reader: NormedProduct | None, num_rows: int) -> Tensor | None:
        """The weight of the norm that is to be made on the way; None: its reader makes it."""
        if reader is None:
            return self._final_norm
        return None if reader.norms(num_rows) else reader.norm

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
