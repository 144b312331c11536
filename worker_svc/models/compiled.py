"""Decoder layers on CPU: weights packed for the C kernels, two library calls per layer.

A layer with experts takes a few more: what stands between its norms is computed by itself. So does
a step with rows that have adapters: each product is a call, and what they add comes after it.

Independent of requests and sampling.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.attention_kind import AttentionKind
from kernels.cpu.library import (
    MAX_HEAD_DIM,
    MAX_HEADS_PER_KV_HEAD,
    AttentionArguments,
    BlockArguments,
    GemmArguments,
    Library,
    PackedLinear,
    StreamArguments,
)
from worker_svc.adapters.sites import LinearPart, Site
from worker_svc.adapters.weights import StepAdapters
from worker_svc.attention.batch import AttentionBatch, HeadLayout
from worker_svc.attention.kv_cache import KVCache
from worker_svc.attention.layer_kv import LayerKv
from worker_svc.attention.page_cache import PageCache
from worker_svc.attention.rope_tables import RopeTables
from worker_svc.models.compiled_experts import CompiledExperts
from worker_svc.models.experts import Experts
from worker_svc.models.layers import MLP, Attention, RMSNorm
from worker_svc.models.linear import Linear
from worker_svc.models.packed_linear import packed
from worker_svc.models.spec import Activation, Feed, MlpSpec, MoeSpec
from worker_svc.quantization.online import Rounding


def supports(heads: HeadLayout, kinds: Collection[AttentionKind]) -> bool:
    """True if head size and GQA group fit the kernels' fixed buffers, and they attend so."""
    heads_per_kv_head = heads.num_heads // heads.num_kv_heads
    if heads.head_dim > MAX_HEAD_DIM or heads_per_kv_head > MAX_HEADS_PER_KV_HEAD:
        return False
    return all(kind.chunk is None for kind in kinds)


def feeds(specs: Collection[Feed | None]) -> bool:
    """True if the kernels compute what feeds forward in all layers."""
    of_mlps = {Activation.SILU, Activation.GELU_TANH}
    return all(
        (isinstance(spec, MlpSpec) and spec.activation in of_mlps)
        or (isinstance(spec, MoeSpec) and spec.activation is Activation.SILU)
        for spec in specs
    )


@dataclass(frozen=True, slots=True)
class CompiledMlp:
    """Packed weights of an MLP."""

    gate_up: PackedLinear
    down: PackedLinear
    activation: Activation

    @classmethod
    def of(cls, library: Library, mlp: MLP) -> "CompiledMlp":
        gate_up, down = (packed(library, linear) for linear in mlp.linears)
        return cls(gate_up, down, mlp.activation)


@dataclass(frozen=True, slots=True)
class CompiledLayer:
    """Packed weights of one decoder layer."""

    input_norm: Tensor  # [hidden] float32, as all weights of norms
    qkv: PackedLinear
    qk_norm: Tensor | None  # [H + Hkv, D]
    sinks: Tensor | None  # [H] float32
    o: PackedLinear
    post_norm: Tensor  # [hidden]
    feed: CompiledMlp | CompiledExperts
    output_norms: tuple[Tensor | None, Tensor | None]  # [hidden] of attention, and of the MLP

    @property
    def linears(self) -> list[PackedLinear]:
        """The products that run between the norms of one library call."""
        feed = self.feed
        of_feed = [feed.gate_up, feed.down] if isinstance(feed, CompiledMlp) else []
        return [self.qkv, self.o, *of_feed]

    @classmethod
    def of(
        cls,
        library: Library,
        heads: HeadLayout,
        input_norm: RMSNorm,
        attention: Attention,
        post_norm: RMSNorm,
        feed: MLP | Experts,
        output_norms: tuple[RMSNorm | None, RMSNorm | None],
    ) -> "CompiledLayer":
        qkv, o = (packed(library, linear) for linear in attention.linears)
        qk_norm = None
        if attention.qk_norms is not None:
            q_norm, k_norm = attention.qk_norms
            rows = [q_norm] * heads.num_heads + [k_norm] * heads.num_kv_heads
            qk_norm = torch.stack(rows).float()
        sinks = None if attention.sinks is None else attention.sinks.float()
        of_attention, of_mlp = (
            None if norm is None else norm.weight.float() for norm in output_norms
        )
        of_feed: CompiledMlp | CompiledExperts
        if isinstance(feed, MLP):
            of_feed = CompiledMlp.of(library, feed)
        else:
            of_feed = CompiledExperts(library, feed)
        return cls(
            input_norm.weight.float(), qkv, qk_norm, sinks, o, post_norm.weight.float(),
            of_feed, (of_attention, of_mlp),
        )  # fmt: skip


class CompiledDecoder:
    """All layers, the final norm and the LM head."""

    def __init__(
        self,
        library: Library,
        layers: list[CompiledLayer],
        final_norm: Tensor,
        head: Linear,
        eps: float,
        heads: HeadLayout,
        ropes: RopeTables,
        kinds: Sequence[AttentionKind],
        head_rounding: Rounding | None,
    ) -> None:
        self._library = library
        self._layers = layers
        self._final_norm = final_norm = final_norm.float()
        self._head = packed(library, head, head_rounding)
        self._eps, self._heads = eps, heads
        # Layers that rotate and see alike share the arguments of a step.
        attending = list(zip(ropes.of_layer, kinds, strict=True))
        alike = list(dict.fromkeys(attending))
        self._attending = [(ropes.tables[each[0]], each[1]) for each in alike]
        self._first_of = [attending.index(each) for each in alike]
        self._attends_as = [alike.index(each) for each in attending]
        next_norms = [layer.input_norm for layer in layers[1:]] + [final_norm]
        next_qkvs = [layer.qkv.arguments for layer in layers[1:]] + [GemmArguments()]
        # One GEMM of each kind and format: layers may differ in that of their integers.
        self._kinds = list(
            {
                (one.num_inputs, one.num_totals, int(one.arguments.bits)): one
                for layer in layers
                for one in layer.linears
            }.values()
        )
        self._mlps = [layer.feed for layer in layers if isinstance(layer.feed, CompiledMlp)]
        self._blocks = [
            _block(layer, next_norm, next_qkv, len(final_norm), eps)
            for layer, next_norm, next_qkv in zip(layers, next_norms, next_qkvs, strict=True)
        ]

    @property
    def isa(self) -> str:
        """The instruction set of the loaded kernels."""
        return self._library.isa

    def forward(
        self,
        residual: Tensor,
        positions: Tensor,
        kv_cache: KVCache | PageCache,
        batch: AttentionBatch,
        adapters: StepAdapters | None = None,
    ) -> Tensor:
        """Embedded tokens [T, hidden], overwritten -> normed hidden states [T, hidden]."""
        if adapters is not None and adapters.rows:
            return self._forward_adapted(residual, positions, kv_cache, batch, adapters)
        first, num_tokens = self._layers[0], len(residual)
        hidden = self._library.rms_norm(residual, first.input_norm, self._eps)
        added = torch.empty_like(residual)
        inner_size = max((mlp.down.num_inputs for mlp in self._mlps), default=0)
        gate_up = residual.new_empty((num_tokens, 2 * inner_size))
        inner = residual.new_empty((num_tokens, inner_size))
        qkv = residual.new_empty((num_tokens, first.qkv.num_outputs))
        attended = residual.new_empty((num_tokens, self._heads.num_heads * self._heads.head_dim))
        scratch = self._library.scratch(num_tokens, *self._kinds)
        stream = StreamArguments(
            attended.data_ptr(), residual.data_ptr(), hidden.data_ptr(), added.data_ptr(),
            gate_up.data_ptr(), inner.data_ptr(), qkv.data_ptr(),
            *scratch.addresses, num_tokens,
        )  # fmt: skip
        self._library.linear(hidden, first.qkv, qkv)
        steps = self._attention_steps(positions, kv_cache, batch)
        for index, (layer, block) in enumerate(zip(self._layers, self._blocks, strict=True)):
            self._attend(index, steps, qkv, kv_cache, attended)
            if isinstance(layer.feed, CompiledMlp):
                self._library.decoder_block(block, stream)
                continue
            self._library.begin_block(block, stream)
            layer.feed(hidden, added)
            self._library.finish_block(block, stream)
        return hidden

    def _forward_adapted(
        self,
        residual: Tensor,
        positions: Tensor,
        kv_cache: KVCache | PageCache,
        batch: AttentionBatch,
        adapters: StepAdapters,
    ) -> Tensor:
        """As `forward`, for a step with rows that have adapters: each product by itself."""
        library, eps = self._library, self._eps

        def multiply(x: Tensor, by: PackedLinear, site: Site) -> Tensor:
            y = library.linear(x, by, x.new_empty((len(x), by.num_outputs)))
            adapters.add(site, x, y)
            return y

        def add(x: Tensor, output_norm: Tensor | None, next_norm: Tensor) -> Tensor:
            x = x if output_norm is None else library.rms_norm(x, output_norm, eps)
            return library.add_rms_norm_(x, residual, next_norm, eps)

        hidden = library.rms_norm(residual, self._layers[0].input_norm, eps)
        attended = residual.new_empty((len(residual), self._layers[0].o.num_inputs))
        steps = self._attention_steps(positions, kv_cache, batch)
        next_norms = [*(layer.input_norm for layer in self._layers[1:]), self._final_norm]
        for index, (layer, next_norm) in enumerate(zip(self._layers, next_norms, strict=True)):
            qkv = multiply(hidden, layer.qkv, Site(index, LinearPart.QKV))
            self._attend(index, steps, qkv, kv_cache, attended)
            of_attention, of_feed = layer.output_norms
            projected = multiply(attended, layer.o, Site(index, LinearPart.OUTPUT))
            hidden = add(projected, of_attention, layer.post_norm)
            if isinstance(layer.feed, CompiledMlp):
                gate_up = multiply(hidden, layer.feed.gate_up, Site(index, LinearPart.GATE_UP))
                is_gelu = layer.feed.activation is Activation.GELU_TANH
                act = library.gelu_and_mul if is_gelu else library.silu_and_mul
                fed = multiply(act(gate_up), layer.feed.down, Site(index, LinearPart.DOWN))
            else:
                layer.feed(hidden, fed := torch.empty_like(residual))
            hidden = add(fed, of_feed, next_norm)
        return hidden

    def _attention_steps(
        self, positions: Tensor, kv_cache: KVCache | PageCache, batch: AttentionBatch
    ) -> "list[_AttentionStep]":
        """The step, for each way in which layers attend."""
        return [
            self._attention_step(cos_sin, kind, positions, kv_cache.of_layer(first), batch)
            for (cos_sin, kind), first in zip(self._attending, self._first_of, strict=True)
        ]

    def _attend(
        self,
        index: int,
        steps: "list[_AttentionStep]",
        qkv: Tensor,
        kv_cache: KVCache | PageCache,
        attended: Tensor,
    ) -> None:
        """A layer's attention, from its projection [T, (H + 2 Hkv) D] to `attended` [T, H D]."""
        layer, kv = self._layers[index], kv_cache.of_layer(index)
        assert isinstance(kv.rows, Tensor)  # keys and values have one size
        self._library.attend(
            steps[self._attends_as[index]].arguments, qkv, layer.qk_norm, kv.rows, kv.scales,
            attended, kv.key_offsets, layer.sinks,
        )  # fmt: skip

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [R, hidden] -> float32 [R, vocab]."""
        out = torch.empty((len(hidden), self._head.num_outputs), dtype=torch.float32)
        return self._library.linear(hidden.contiguous(), self._head, out)

    def _attention_step(
        self,
        cos_sin: Tensor,
        kind: AttentionKind,
        positions: Tensor,
        kv: LayerKv,
        batch: AttentionBatch,
    ) -> "_AttentionStep":
        """The step of layers of a kind that rotate by a table, [P, D] float32; `kv` is of one."""
        heads = self._heads
        batch = batch.of_group(kv.group)
        tables, slots = batch.block_tables.contiguous(), kv.rows_of(batch.slot_mapping)
        arguments = AttentionArguments(
            num_heads=heads.num_heads,
            num_kv_heads=heads.num_kv_heads,
            head_dim=heads.head_dim,
            block_size=kv.block_size,
            block_rows=kv.rows_per_block,
            table_width=tables.shape[1],
            scale=kind.scale,
            window=kind.window or 0,
            eps=self._eps,
            softcap=kind.softcap or 0,
            cos_sin=cos_sin.data_ptr(),
            positions=positions.data_ptr(),
            slots=slots.data_ptr(),
            tables=tables.data_ptr(),
            context_lens=batch.context_lens.data_ptr(),
            starts=batch.cu_seqlens_q.data_ptr(),
            rows=len(positions),
            sequences=len(batch.context_lens),
        )
        return _AttentionStep(arguments, tables, slots)


@dataclass(frozen=True, slots=True)
class _AttentionStep:
    """A step's arguments for layers that attend alike, and the tensors that they point into."""

    arguments: AttentionArguments
    tables: Tensor
    slots: Tensor


def _block(
    layer: CompiledLayer, next_norm: Tensor, next_qkv: GemmArguments, hidden: int, eps: float
) -> BlockArguments:
    """The arguments from a layer's attention to the next norm and QKV."""
    block = BlockArguments(
        o=layer.o.arguments,
        next_qkv=next_qkv,
        post_norm=layer.post_norm.data_ptr(),
        next_norm=next_norm.data_ptr(),
        attention_output_norm=_at(layer.output_norms[0]),
        mlp_output_norm=_at(layer.output_norms[1]),
        hidden=hidden,
        eps=eps,
    )
    feed = layer.feed
    if isinstance(feed, CompiledMlp):
        block.gate_up, block.down = feed.gate_up.arguments, feed.down.arguments
        block.inner = feed.down.num_inputs
        block.gelu = feed.activation is Activation.GELU_TANH
    return block


def _at(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
