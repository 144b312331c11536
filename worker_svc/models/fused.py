"""Decoder layers on CUDA, in as few kernels as the number of rows allows.

All layers add to one residual tensor. `fused_gemms` selects the GEMM implementation and which of
the neighbouring operations are fused into it. Independent of requests and sampling.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from torch import Tensor

from kernels.attention.rope import norm_rope_write_kv
from kernels.attention_kind import AttentionKind
from kernels.comm.all_reduce import TableRows, all_reduce
from kernels.gemm.cublas_lt import GemmKind
from kernels.norm.output_norm import add_output_norm
from kernels.norm.rms_norm import add_rms_norm, rms_norm
from worker_svc.adapters.sites import LinearPart, Site
from worker_svc.attention.backend import AttentionChoice, LayerChoices
from worker_svc.attention.batch import AttentionBatch, HeadLayout, LastTokens
from worker_svc.attention.call import AttentionCall
from worker_svc.attention.kv_cache import KVCache
from worker_svc.attention.page_cache import PageCache
from worker_svc.attention.triton import Rotary, TritonAttention
from worker_svc.models.adapted_gemms import AdaptedLinear, AdaptedNormedLinear, Add
from worker_svc.models.cluster_layers import ClusterLayers, LayerWeights
from worker_svc.models.embedding import Embedding
from worker_svc.models.experts import Experts
from worker_svc.models.fused_experts import FusedExperts
from worker_svc.models.fused_gemms import (
    FusedLinear,
    Hidden,
    NormedLinear,
    TunedGemms,
    kind_of,
    with_gemms,
)
from worker_svc.models.gemm_choices import Choices
from worker_svc.models.layer_stack import TileHeads
from worker_svc.models.layers import MLP, Attention, RMSNorm
from worker_svc.models.spec import Activation, rehearsed
from worker_svc.models.stored.narrow_gemms import (
    NarrowLinear,
    NormedNarrowLinear,
    added,
    gemm_of,
    normed_gemm_of,
)
from worker_svc.parallel.group import Group
from worker_svc.parallel.peer_memory import Slot

if TYPE_CHECKING:
    from kernels.cluster.decode_layer import DecodeLayer

Cache = KVCache | PageCache
Gemm = FusedLinear | NarrowLinear | AdaptedLinear
NormedGemm = NormedLinear | NormedNarrowLinear | AdaptedNormedLinear


@dataclass(frozen=True, slots=True)
class FusedMlp:
    """The weights of an MLP and of the norm in front of it."""

    gate_up: NormedGemm
    down: Gemm
    activation: Activation = Activation.SILU

    @classmethod
    def of(cls, norm: RMSNorm, mlp: MLP) -> "FusedMlp":
        gate_up, down = mlp.linears
        return cls(normed_gemm_of(norm, gate_up), gemm_of(down), mlp.activation)

    def gated(self, hidden: Hidden, eps: float) -> Tensor:
        """act(gate) * up of the normed residual: [T, I]."""
        return self.gate_up.gated(hidden, eps, self.activation is not Activation.SILU)


@dataclass(frozen=True, slots=True)
class FusedLayer:
    """The weights of one decoder layer."""

    kind: AttentionKind
    qkv: NormedGemm
    cos_sin: Tensor  # [P, R] float32, of the R first dimensions of a head
    # [D] each, or [H D] and [Hkv D] of all heads; None for models without QK norm
    qk_norms: tuple[Tensor, Tensor] | None
    o: Gemm
    feed: FusedMlp | FusedExperts
    # [hidden] of attention, and of what feeds forward
    output_norms: tuple[Tensor | None, Tensor | None] = (None, None)
    sinks: Tensor | None = None  # [H], where the kind has them
    norms_all_heads: bool = False  # one norm is of all heads' queries, and one of all keys

    @classmethod
    def of(
        cls,
        kind: AttentionKind,
        cos_sin: Tensor,
        input_norm: RMSNorm,
        attention: Attention,
        post_norm: RMSNorm,
        feed: MLP | Experts,
        output_norms: tuple[RMSNorm | None, RMSNorm | None],
    ) -> "FusedLayer":
        qkv, o = attention.linears
        normed_qkv = normed_gemm_of(input_norm, qkv)
        fused_feed: FusedMlp | FusedExperts
        if isinstance(feed, MLP):
            fused_feed = FusedMlp.of(post_norm, feed)
        else:
            fused_feed = FusedExperts.of(post_norm, feed)
        norms = _weight(output_norms[0]), _weight(output_norms[1])
        return cls(
            kind,
            normed_qkv,
            cos_sin,
            attention.qk_norms,
            gemm_of(o),
            fused_feed,
            norms,
            attention.sinks,
            attention.norms_all_heads,
        )

    @property
    def is_usual(self) -> bool:
        """True if heads are normed one by one, outputs are added as they are, and SiLU gates."""
        is_silu = isinstance(self.feed, FusedMlp) and self.feed.activation is Activation.SILU
        return is_silu and self.output_norms == (None, None) and not self.norms_all_heads

    @property
    def has_bias(self) -> bool:
        """True if any of its linear layers has one."""
        return any(linear.bias is not None for linear, _ in self._linears(adds=True))

    @property
    def reads_norm(self) -> NormedGemm | FusedExperts:
        """The part that norms the stream between attention and feed."""
        return self.feed.gate_up if isinstance(self.feed, FusedMlp) else self.feed

    @property
    def plain(self) -> LayerWeights | None:
        """The layer's weights as plain ones; None if one has fewer bits, or there are experts."""
        if not isinstance(self.feed, FusedMlp):
            return None
        qkv, o, gate_up, down = self.qkv, self.o, self.feed.gate_up, self.feed.down
        if not isinstance(qkv, NormedLinear) or not isinstance(gate_up, NormedLinear):
            return None
        if not isinstance(o, FusedLinear) or not isinstance(down, FusedLinear):
            return None
        return LayerWeights(qkv, self.cos_sin, self.qk_norms, o, gate_up, down)

    def weights(self, adds: bool) -> Iterator[tuple[GemmKind, Tensor]]:
        """Kind and weight of the layer's GEMMs; `adds`: whether o and down add to the residual."""
        for linear, is_added in self._linears(adds):
            if not isinstance(linear, FusedLinear | NormedLinear):
                continue
            if (kind := kind_of(linear, is_added)) is not None:
                yield kind, linear.weight

    def tuned(self, adds: bool, chosen: Mapping[GemmKind, TunedGemms]) -> "FusedLayer":
        """This layer with the tuned algorithms for the kinds that `weights` yields."""
        feed, (o_adds, down_adds) = self.feed, self._added(adds)
        if isinstance(feed, FusedMlp):
            gate_up = _tuned(feed.gate_up, False, chosen)
            down = _tuned(feed.down, down_adds, chosen)
            feed = replace(feed, gate_up=gate_up, down=down)
        return replace(
            self,
            qkv=_tuned(self.qkv, False, chosen),
            o=_tuned(self.o, o_adds, chosen),
            feed=feed,
        )

    def adapted(self, index: int, add: Callable[[Site], Add]) -> "FusedLayer":
        """This layer, which calls what `add` gives for each linear layer after its product."""
        feed = self.feed
        if isinstance(feed, FusedMlp):
            gate_up = AdaptedNormedLinear(feed.gate_up, add(Site(index, LinearPart.GATE_UP)))
            down = AdaptedLinear(feed.down, add(Site(index, LinearPart.DOWN)))
            feed = replace(feed, gate_up=gate_up, down=down)
        return replace(
            self,
            qkv=AdaptedNormedLinear(self.qkv, add(Site(index, LinearPart.QKV))),
            o=AdaptedLinear(self.o, add(Site(index, LinearPart.OUTPUT))),
            feed=feed,
        )

    def _linears(self, adds: bool) -> Iterator[tuple[NormedGemm | Gemm, bool]]:
        """The layer's GEMMs, and whether each adds to the residual."""
        o_adds, down_adds = self._added(adds)
        yield from ((self.qkv, False), (self.o, o_adds))
        if isinstance(self.feed, FusedMlp):
            yield from ((self.feed.gate_up, False), (self.feed.down, down_adds))

    def _added(self, adds: bool) -> tuple[bool, bool]:
        """True for o and for down where each adds to the residual: no norm is in between."""
        of_attention, of_feed = self.output_norms
        return adds and of_attention is None, adds and of_feed is None


def _weight(norm: RMSNorm | None) -> Tensor | None:
    return None if norm is None else norm.weight


G = TypeVar("G", Gemm, NormedGemm)


def _tuned(linear: G, adds: bool, chosen: Mapping[GemmKind, TunedGemms]) -> G:
    if not isinstance(linear, FusedLinear | NormedLinear):
        return linear
    return with_gemms(linear, adds, chosen)


class FusedDecoder:
    """All layers, the final norm and the LM head."""

    def __init__(
        self,
        embedding: Embedding,
        layers: list[FusedLayer],
        final_norm: Tensor,
        head: Tensor,
        eps: float,
        heads: HeadLayout,
        group: Group,
        residual_scale: float = 1.0,
    ) -> None:
        """`residual_scale` is a factor on what attention and feed return, before it is added."""
        self._embedding = embedding
        self._layers = layers
        self._places = list(range(len(layers)))  # of their keys and values in the cache
        self._group = group
        self._final_norm = final_norm
        self._head = FusedLinear(head, None)
        self._eps = eps
        self._heads = heads
        self._residual_scale = residual_scale
        self.triton = TritonAttention(heads, head)
        by_triton = AttentionChoice(self.triton, self.triton, self.triton)
        self.attention = LayerChoices(dict.fromkeys(self.kinds, by_triton))
        self.one_row: ClusterLayers | None = None  # None: one row is a batch like any other
        self.gemm_choices: Choices = {}

    @property
    def has_biases(self) -> bool:
        """True if a linear layer has one."""
        return any(layer.has_bias for layer in self._layers)

    @property
    def attention(self) -> LayerChoices:
        """The attention backends; can be replaced until the first graph is captured."""
        return self._attention

    @attention.setter
    def attention(self, choices: LayerChoices) -> None:
        self._attention = choices
        self._attends_by = [choices.of_kind[layer.kind] for layer in self._layers]

    @property
    def kinds(self) -> tuple[AttentionKind, ...]:
        """The different ways in which layers attend."""
        return tuple(dict.fromkeys(layer.kind for layer in self._layers))

    @property
    def is_usual(self) -> bool:
        """True if no layer does more than attention and an MLP with SiLU."""
        is_plain = self._residual_scale == 1.0
        return is_plain and all(layer.is_usual for layer in self._layers)

    @property
    def has_plain_weights(self) -> bool:
        """True if all layers' weights have the type of the activations."""
        return all(layer.plain is not None for layer in self._layers)

    @property
    def is_sharded(self) -> bool:
        """True if other ranks hold a part of each layer."""
        return self._group.size > 1

    def cluster_layers(self, kernels: "DecodeLayer") -> ClusterLayers:
        """All layers for one row, by these kernels. Raises TypeError unless all are plain."""
        layers = [layer.plain for layer in self._layers]
        plain = [layer for layer in layers if layer is not None]
        if len(plain) < len(layers):
            raise TypeError("clusters multiply plain weights only")
        return ClusterLayers.of(kernels, plain, self._final_norm)

    def with_one_row(self, one_row: ClusterLayers | None) -> "FusedDecoder":
        """The same decoder with these layers for one row."""
        other = copy.copy(self)
        other.one_row = one_row
        return other

    def library_weights(self) -> dict[GemmKind, list[Tensor]]:
        """Weights of all layers that the library multiplies, by kind of GEMM."""
        found: dict[GemmKind, list[Tensor]] = {}
        for layer in self._layers:
            for kind, weight in layer.weights(self._adds):
                found.setdefault(kind, []).append(weight)
        return found

    def tune(self, choices: Choices, chosen: Mapping[GemmKind, TunedGemms]) -> None:
        """Sets the tuned GEMM algorithms; must be called before a graph is captured."""
        self.gemm_choices = choices
        self._layers = [layer.tuned(self._adds, chosen) for layer in self._layers]

    @property
    def _adds(self) -> bool:
        """True if GEMMs add to the residual, unless a layer norms what they return."""
        return self._group.size == 1 and self._residual_scale == 1.0

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv_cache: Cache,
        batch: AttentionBatch,
        last: LastTokens | None = None,
    ) -> Tensor:
        """Token ids [T] -> normed hidden states [T, hidden], or with `last` [R, hidden].

        With `last` the last layer computes only keys and values for the other tokens.
        """
        if last is not None:
            hidden, q = self._begin(token_ids, positions, kv_cache, batch)
            hidden, q, batch = _of_last(last, hidden, q)
            return self._finish(hidden, q, kv_cache, batch) if len(q) else hidden.residual
        if self.one_row is not None and len(token_ids) == 1 and batch.is_decode:
            assert not isinstance(kv_cache, PageCache)  # clusters are for layers without windows
            return self.one_row.forward(self._embedding(token_ids), positions, kv_cache, batch)
        hidden = self._embed(token_ids)
        for index in range(len(self._layers)):
            hidden = self._layer(index, hidden, positions, kv_cache, batch)
        return self._normed(hidden)

    @property
    def splits(self) -> bool:
        """True: see `begin` and `finish`."""
        return True

    @property
    def carried_widths(self) -> tuple[int, int]:
        """The widths of the residual, and of the queries of the last layer."""
        return len(self._final_norm), self._heads.num_heads * self._heads.head_dim

    @property
    def tile_heads(self) -> TileHeads:
        """The heads of all layers' attention."""
        heads = self._heads
        return TileHeads(heads.num_heads, heads.num_kv_heads, heads.head_dim)

    def begin(
        self, token_ids: Tensor, positions: Tensor, kv_cache: Cache, batch: AttentionBatch
    ) -> tuple[Tensor, Tensor]:
        """Everything before the last layer's attention: the residual, and queries [T, H * D].

        All keys and values are in the cache then.
        """
        hidden, q = self._begin(token_ids, positions, kv_cache, batch)
        return hidden.residual, q.flatten(1)

    def finish(
        self, carried: tuple[Tensor, Tensor], kv_cache: Cache, batch: AttentionBatch
    ) -> Tensor:
        """The rest for some rows of what `begin` returns: hidden states [R, hidden], normed.

        The residual may be overwritten.
        """
        residual, q = carried
        queries = q.view(len(q), -1, self._heads.head_dim)
        return self._finish(Hidden(residual), queries, kv_cache, batch)

    def _begin(
        self, token_ids: Tensor, positions: Tensor, kv_cache: Cache, batch: AttentionBatch
    ) -> tuple[Hidden, Tensor]:
        hidden, last = self._embed(token_ids), len(self._layers) - 1
        for index in range(last):
            hidden = self._layer(index, hidden, positions, kv_cache, batch)
        qkv, rms_of = self._layers[last].qkv(hidden, self._eps)
        return hidden, self._write_kv(last, qkv, rms_of, positions, kv_cache, batch)

    def _finish(self, hidden: Hidden, q: Tensor, kv_cache: Cache, batch: AttentionBatch) -> Tensor:
        last = len(self._layers) - 1
        return self._normed(self._close(last, hidden, self._attend(last, q, kv_cache, batch)))

    def _normed(self, hidden: Hidden) -> Tensor:
        """The last layer's output, normed."""
        if hidden.normed is not None:
            return hidden.normed
        return rms_norm(hidden.residual, self._final_norm, self._eps)

    def _layer(
        self,
        index: int,
        hidden: Hidden,
        positions: Tensor,
        kv_cache: Cache,
        batch: AttentionBatch,
    ) -> Hidden:
        """A layer as a whole."""
        layer = self._layers[index]
        qkv, rms_of = layer.qkv(hidden, self._eps)  # [T, (H + 2 Hkv) D]
        attended = None
        if rms_of is None and self._attends_by[index].decode is self.triton:
            rotary = Rotary(positions, layer.cos_sin, layer.qk_norms, self._eps)
            kv = kv_cache.of_layer(self._places[index])
            of_group = batch.of_group(kv.group)
            attended = self.triton.from_projection(qkv, rotary, kv, layer.kind, of_group)
        if attended is None:
            q = self._write_kv(index, qkv, rms_of, positions, kv_cache, batch)
            attended = self._attend(index, q, kv_cache, batch)
        return self._close(index, hidden, attended)

    def _write_kv(
        self,
        index: int,
        qkv: Tensor,
        rms_of: Tensor | None,
        positions: Tensor,
        kv_cache: Cache,
        batch: AttentionBatch,
    ) -> Tensor:
        """A layer's queries [T, H, D]; its keys and values go to the cache."""
        kv, layer = kv_cache.of_layer(self._places[index]), self._layers[index]
        q_norm, k_norm = layer.qk_norms or (None, None)
        slot_mapping = batch.of_group(kv.group).slot_mapping
        return norm_rope_write_kv(
            qkv, positions, layer.cos_sin, kv.k, kv.v, slot_mapping, q_norm, k_norm,
            self._eps, rms_of, kv.scales, kv.key_offsets,
        )  # fmt: skip

    def _close(self, index: int, hidden: Hidden, attended: Tensor) -> Hidden:
        """A layer from what it attended to, [T, H, D], on."""
        layer = self._layers[index]
        of_attention, of_feed = layer.output_norms
        x, reader = attended.flatten(1), layer.reads_norm
        hidden = self._add(layer.o, x, hidden, Slot.ATTENTION, reader, of_attention)
        if isinstance(layer.feed, FusedExperts):
            return self._add_experts(layer.feed, hidden, self._behind(index), of_feed)
        inner = layer.feed.gated(hidden, self._eps)  # [T, I]
        return self._add(layer.feed.down, inner, hidden, Slot.MLP, self._behind(index), of_feed)

    def rehearsed(self) -> "FusedDecoder":
        """A decoder of few layers: the kernels of all, meaningless output."""
        short = copy.copy(self)
        kept = rehearsed([(layer.kind, type(layer.feed).__name__) for layer in self._layers])
        short._layers = [self._layers[index] for index in kept]
        short._places = [self._places[index] for index in kept]
        short.attention = self._attention
        short.one_row = self.one_row and self.one_row.shortened(len(kept))
        return short

    def shortened(self, num_layers: int) -> "FusedDecoder":
        """A decoder of the first layers."""
        short = copy.copy(self)
        short._layers = self._layers[:num_layers]
        short.one_row = self.one_row and self.one_row.shortened(num_layers)
        return short

    def head(self, hidden: Tensor) -> Tensor:
        """Hidden states [R, hidden] -> logits [R, N] of this rank's tokens, in the model's type."""
        return self._head(hidden)

    def _embed(self, token_ids: Tensor) -> Hidden:
        table = self._embedding.table
        num_bytes = len(token_ids) * table.shape[1] * table.element_size()
        inboxes = self._group.inboxes_for(num_bytes) if self._embedding.scale == 1.0 else None
        if inboxes is None:
            return Hidden(self._embedding(token_ids))
        rows = TableRows(table, token_ids, self._embedding.first_token)
        norm = self._wanted(self._behind(-1), len(token_ids))
        return Hidden(*all_reduce(rows, inboxes, Slot.EMBEDDING, None, norm, self._eps))

    def _behind(self, index: int) -> NormedGemm | None:
        """The normed GEMM after layer `index` (-1: after the embedding); None: the final norm."""
        return self._layers[index + 1].qkv if index + 1 < len(self._layers) else None

    def _add(
        self,
        linear: Gemm,
        x: Tensor,
        hidden: Hidden,
        slot: Slot,
        reader: NormedGemm | FusedExperts | None,
        output_norm: Tensor | None,
    ) -> Hidden:
        """x @ W.T, summed over the ranks, plus the residual, which may be overwritten.

        With `output_norm` [hidden] the sum is normed before. Also computes the next norm where that
        costs nothing and `reader` does not compute it.
        """
        residual = hidden.residual
        if output_norm is not None or self._residual_scale != 1.0:
            return self._add_changed(linear(x), residual, reader, output_norm)
        if self._group.size == 1:
            return added(linear, x, residual, reader, self._eps)
        inboxes = self._group.inboxes_for(residual.nbytes)
        if inboxes is None:
            return self._added(self._group.all_reduce(linear(x)), residual, reader)
        weight = self._wanted(reader, len(residual))
        return Hidden(*linear.summed(x, inboxes, slot, residual, weight, self._eps))

    def _add_experts(
        self,
        experts: FusedExperts,
        hidden: Hidden,
        reader: NormedGemm | None,
        output_norm: Tensor | None,
    ) -> Hidden:
        """The experts' output, summed over the ranks, plus the residual."""
        residual = hidden.residual
        if output_norm is not None or self._residual_scale != 1.0:
            part = experts(hidden, self._eps, None)
            return self._add_changed(part, residual, reader, output_norm)
        if self._group.size == 1:
            return Hidden(experts(hidden, self._eps, residual))
        part = experts(hidden, self._eps, None)
        inboxes = self._group.inboxes_for(residual.nbytes)
        if inboxes is None:
            return self._added(self._group.all_reduce(part), residual, reader)
        weight = self._wanted(reader, len(residual))
        return Hidden(*all_reduce(part, inboxes, Slot.MLP, residual, weight, self._eps))

    def _add_changed(
        self,
        part: Tensor,
        residual: Tensor,
        reader: NormedGemm | FusedExperts | None,
        output_norm: Tensor | None,
    ) -> Hidden:
        """A rank's part, summed over the ranks, normed and scaled, plus the residual."""
        total = self._group.all_reduce(part)
        if output_norm is None:
            return self._added(total, residual, reader)
        wanted, scale = self._wanted(reader, len(residual)), self._residual_scale
        return Hidden(*add_output_norm(total, output_norm, residual, self._eps, scale, wanted))

    def _added(
        self, x: Tensor, residual: Tensor, reader: NormedGemm | FusedExperts | None
    ) -> Hidden:
        """x, scaled, plus the residual, which may be overwritten; the norm that is wanted."""
        weight, scale = self._wanted(reader, len(residual)), self._residual_scale
        if weight is None:
            return Hidden(residual.add_(x, alpha=scale))
        normed, total = add_rms_norm(x, residual, weight, self._eps, scale)
        return Hidden(total, normed)

    def _wanted(self, reader: NormedGemm | FusedExperts | None, num_rows: int) -> Tensor | None:
        """The norm weight to apply after an all-reduce; None: the reader computes the norm."""
        if reader is None:
            return self._final_norm
        return None if reader.norms(num_rows) else reader.norm

    def _attend(self, index: int, q: Tensor, kv_cache: Cache, batch: AttentionBatch) -> Tensor:
        layer = self._layers[index]
        kv = kv_cache.of_layer(self._places[index])
        of_group = batch.of_group(kv.group)
        call = AttentionCall(q, kv, of_group, layer.kind, sinks=layer.sinks)
        return self._attends_by[index].attend(call)


def with_adapters(decoder: FusedDecoder, add: Callable[[Site], Add]) -> FusedDecoder:
    """The same decoder with layers that call what `add` gives for a site after its product."""
    other = decoder.with_one_row(None)
    other._layers = [layer.adapted(index, add) for index, layer in enumerate(decoder._layers)]
    return other


def _of_last(last: LastTokens, hidden: Hidden, q: Tensor) -> tuple[Hidden, Tensor, AttentionBatch]:
    """Residual rows, queries and batch of the last tokens, for the rest of the last layer."""
    residual = hidden.residual.index_select(0, last.rows)
    return Hidden(residual), q.index_select(0, last.rows), last.attention
