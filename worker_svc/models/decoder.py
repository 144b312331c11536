"""Decoder of a `ModelSpec`: layers of attention and MLP between an embedding and a head.

Runs one step over flat tokens and writes the KV cache, and the states of layers that have some in
place of attention. Independent of requests and sampling; these are its only state. With tensor
parallelism each rank holds a shard of every layer and computes the logits of its part of the
vocabulary; hidden states are complete and equal on all ranks.
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernels import fp8
from kernels.attention_kind import AttentionKind
from kernels.cpu import library
from kernels.cpu.library import Library
from worker_svc.adapters.packing import PackedLayout
from worker_svc.adapters.sites import LinearPart, Site
from worker_svc.adapters.weights import PlainProduct, Product
from worker_svc.attention.batch import AttentionBatch, HeadLayout, LastTokens, fuses
from worker_svc.attention.kv_cache import KVCache
from worker_svc.attention.kv_plan import KvPlan
from worker_svc.attention.layer_cache import LayerCache
from worker_svc.attention.page_cache import PageCache
from worker_svc.attention.torch_backend import AttentionParts, AttentionStep
from worker_svc.models import compiled, kernel_limits
from worker_svc.models.adapter_targets import AdaptableLayers
from worker_svc.models.compiled import CompiledDecoder, CompiledLayer
from worker_svc.models.cpu_weights import activation_dtype
from worker_svc.models.embedding import Embedding, IntegerEmbedding
from worker_svc.models.experts import ExpertForm, Experts
from worker_svc.models.latent import LatentAttention
from worker_svc.models.layer_inputs import LayerEnd, LayerInputs
from worker_svc.models.layer_loop import LayerLoop, LoopLayer
from worker_svc.models.layer_stack import LayerStack
from worker_svc.models.layers import MLP, Attention, Destinations, RMSNorm, whole
from worker_svc.models.linear import Linear
from worker_svc.models.mlp_and_experts import MlpAndExperts
from worker_svc.models.packed_linear import product_of
from worker_svc.models.recurrent import RecurrentMixer, mixer_of
from worker_svc.models.rope import rope_tables
from worker_svc.models.sharding import Sharding
from worker_svc.models.spec import (
    AttentionSpec,
    Feed,
    LayerSpec,
    MlpAndExpertsSpec,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    TensorNames,
    stored_places,
)
from worker_svc.parallel.group import ALONE, Group
from worker_svc.parallel.vocab_part import VocabPart
from worker_svc.quantization import registry as quantizations
from worker_svc.quantization.gguf import GgufTypes
from worker_svc.quantization.mxfp4 import BLOCK, Mxfp4
from worker_svc.quantization.online import head_rounding
from worker_svc.states.slots import SlotStates, StateKey, StateShape, row_bytes
from worker_svc.states.step import StateStep

if TYPE_CHECKING:
    from worker_svc.adapters.on_device import DeviceAdapters
    from worker_svc.models.adapted_stack import AdaptedStack
    from worker_svc.models.composed import ComposedStack
    from worker_svc.models.fused import FusedDecoder

logger = logging.getLogger(__name__)


class DecoderLayer:
    """Attention, or another mixer of tokens, and MLP or experts.

    Each has a norm before it and a residual around it; there may be a norm after each, too.
    """

    def __init__(
        self,
        model: ModelSpec,
        spec: LayerSpec,
        dtype: torch.dtype,
        device: torch.device,
        group: Group,
        form: ExpertForm,
    ) -> None:
        """`group` are the ranks that divide it, `form` is that of experts."""
        size, eps, offset = model.hidden_size, model.rms_norm_eps, model.norm_offset
        self.input_norm = RMSNorm(size, eps, dtype, device, offset)
        self.mixer: Attention | LatentAttention | RecurrentMixer | None = None
        if isinstance(spec.mixer, AttentionSpec) and spec.mixer.latent is not None:
            self.mixer = LatentAttention(size, spec.mixer, spec.mixer.latent, dtype, device)
        elif isinstance(spec.mixer, AttentionSpec):
            self.mixer = Attention(size, spec.mixer, eps, dtype, device, offset, group)
        elif spec.mixer is not None:
            self.mixer = mixer_of(spec.mixer, model, dtype, device)
        # A layer of one part has one norm.
        self.post_norm = self.input_norm
        if spec.mixer is not None and spec.feed is not None:
            self.post_norm = RMSNorm(size, eps, dtype, device, offset)
        self.feed: MLP | Experts | MlpAndExperts | None = None
        if isinstance(spec.feed, MlpSpec):
            self.feed = MLP(size, spec.feed, dtype, device)
        elif isinstance(spec.feed, MlpAndExpertsSpec):
            self.feed = MlpAndExperts(size, spec.feed, eps, dtype, device, group, form)
        elif spec.feed is not None:
            self.feed = Experts(size, spec.feed, dtype, device, form)
        # Of attention, and of what feeds forward.
        self.output_norms: tuple[RMSNorm, RMSNorm] | tuple[None, None] = None, None
        if spec.norms_outputs:
            norms = (RMSNorm(size, eps, dtype, device, offset) for _ in range(2))
            self.output_norms = next(norms), next(norms)
        self.end: LayerEnd | None = None
        if spec.has_factor or model.layer_inputs is not None:
            self.end = LayerEnd(model, dtype, device, has_factor=spec.has_factor)

    @property
    def attention(self) -> Attention:
        """Its attention; for models whose layers all have it."""
        assert isinstance(self.mixer, Attention)
        return self.mixer

    @property
    def _norms(self) -> tuple[RMSNorm, ...]:
        own = (norm for norm in self.output_norms if norm is not None)
        of_feed = self.feed.norms if isinstance(self.feed, MlpAndExperts) else ()
        return tuple(dict.fromkeys((self.input_norm, self.post_norm, *own, *of_feed)))

    def destinations(self, prefix: str, names: TensorNames) -> Destinations:
        yield from self.input_norm.destinations(f"{prefix}.{names.input_norm}")
        if isinstance(self.mixer, Attention | LatentAttention):
            yield from self.mixer.destinations(f"{prefix}.{names.attention}", names)
        elif self.mixer is not None:
            yield from self.mixer.destinations(f"{prefix}.{names.recurrent}")
        if self.post_norm is not self.input_norm:
            yield from self.post_norm.destinations(f"{prefix}.{names.post_norm}")
        if self.feed is not None:
            yield from self.feed.destinations(f"{prefix}.{names.mlp}", names)
        of_attention, of_mlp = self.output_norms
        if of_attention is not None:
            yield from of_attention.destinations(f"{prefix}.{names.attention_output_norm}")
        if of_mlp is not None:
            yield from of_mlp.destinations(f"{prefix}.{names.mlp_output_norm}")
        if self.end is not None:
            yield from self.end.destinations(prefix)

    def drop_output_biases(self) -> None:
        for part in (self.mixer, self.feed):
            if part is not None:
                part.drop_output_bias()

    def add_norm_offsets(self) -> None:
        """Adds the offsets, once, when all weights are filled and before anything reads them."""
        if self.mixer is not None:
            self.mixer.add_norm_offset()
        for norm in self._norms:
            norm.add_offset()

    def pack(self, dtype: torch.dtype) -> None:
        """Once, when all weights are filled; for activations of this type."""
        if self.mixer is not None:
            self.mixer.pack(dtype)
        for norm in self._norms:
            norm.pack(dtype)
        if self.feed is not None:
            self.feed.pack()
        if self.end is not None:
            self.end.pack(dtype)


class Decoder:
    """A model, or one rank's shard of it. Fill `destinations`, then call `pack` once."""

    adaptable: AdaptableLayers  # from `pack` on

    def __init__(
        self,
        model: ModelSpec,
        dtype: torch.dtype,
        device: torch.device,
        max_model_len: int,
        group: Group = ALONE,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        """`kv_dtype` is the type of the KV cache; None: that of the weights."""
        model.check_length(max_model_len)
        self.sharding = Sharding(model, group.rank, group.size)
        spec = self.spec
        self.group = group
        self.dtype = dtype  # of weights
        self.kv_dtype = kv_dtype or dtype
        self.kv_scales: Tensor | None = None  # [L, 4, Hkv], of a cache in FP8; None: all are 1
        self.key_offsets: Tensor | None = None  # [L, Hkv, D], of a cache in FP8; None: 0
        self.device = device
        kinds = [attention.kind(max_model_len) for attention in spec.attentions]
        rotations = [(attention.rope, attention.rotary_dim) for attention in spec.attentions]
        # Of layers with attention.
        self._attention = AttentionParts(
            [attention.heads for attention in spec.attentions],
            [kinds[kinds.index(kind)] for kind in kinds],
            rope_tables(spec.ropes, rotations, max_model_len, device),
            activation_dtype(dtype, device),
            stored_places(spec.attentions),
        )
        self._table = self._head = _per_token(spec, dtype, device)  # [V, hidden]
        self._layer_inputs: LayerInputs | None = None
        if spec.layer_inputs is not None:
            self._layer_inputs = LayerInputs(spec, spec.layer_inputs, dtype, device, group)
        self._layers = [
            DecoderLayer(spec, layer, dtype, device, group, form)
            for layer, form in zip(spec.layers, self._expert_forms(), strict=True)
        ]
        self._final_norm = RMSNorm(
            spec.hidden_size, spec.rms_norm_eps, dtype, device, spec.norm_offset
        )
        if not spec.tie_word_embeddings:
            self._head = _per_token(spec, dtype, device)
        # `pack` selects the implementation of the layers: Triton kernels on CUDA, or torch between
        # some of them, C kernels on CPU, or torch alone, which on CPU may widen narrow weights.
        self.fused: FusedDecoder | None = None
        self.composed: ComposedStack | None = None
        self._compiled: CompiledDecoder | None = None
        # By slot, made with the slots, for a model whose sequences have any.
        self.states: SlotStates | None = None

    @property
    def spec(self) -> ModelSpec:
        """The model with this rank's sizes."""
        return self.sharding.spec

    @property
    def _activation_dtype(self) -> torch.dtype:
        """The type of activations where no kernels choose another."""
        return self._attention.dtype

    @property
    def heads(self) -> HeadLayout:
        """The heads of every layer. Raises UnsupportedModel if layers differ in them."""
        return self.spec.attention.heads

    @property
    def kinds(self) -> Sequence[AttentionKind]:
        """The kind of each layer with attention; equal ones are the same."""
        return self._attention.kinds

    @property
    def _is_fused(self) -> bool:
        """True if Triton kernels compute the layers.

        On the meta device nothing runs; precompilation uses it to find the kernels for CUDA.
        """
        is_on_gpu = self.device.type in ("cuda", "meta")
        is_computed = not kernel_limits.beyond_triton(self.spec, self.group.size)
        return is_on_gpu and is_computed and fuses(self.heads.head_dim)

    @property
    def _is_composed(self) -> bool:
        """True if torch computes some parts of the layers, and Triton kernels the others."""
        stored = self.spec.quantization
        is_read = stored is None or quantizations.is_float8(stored)
        is_read = is_read and not fp8.is_fp8(self.kv_dtype)
        is_served = is_read and not kernel_limits.beyond_composed(self.spec)
        has_kernels = is_served and (self.spec.has_latents or fuses(self.heads.head_dim))
        return self.device.type == "cuda" and has_kernels and not self._is_fused

    def destinations(self) -> Destinations:
        names = self.spec.names
        yield from whole(names.embedding, self._table)
        if self._layer_inputs is not None:
            yield from self._layer_inputs.destinations(names)
        for index, layer in enumerate(self._layers):
            yield from layer.destinations(f"{names.layers}.{index}", names)
        yield from self._final_norm.destinations(names.final_norm)
        if not self.spec.tie_word_embeddings:
            yield from whole(names.head, self._head)

    def pack(self) -> None:
        """Once, when all weights are filled."""
        cpu_library = self._loaded_library()
        self.adaptable = self._adaptable(cpu_library)
        self._embedding = self._embed()
        if self.group.rank > 0:
            for layer in self._layers:
                layer.drop_output_biases()
        for layer in self._layers:
            layer.add_norm_offsets()
        self._final_norm.add_offset()
        if cpu_library is not None:
            self._compiled = self._compile(cpu_library)
            return
        for layer in self._layers:
            layer.pack(self._activation_dtype)
        if self._layer_inputs is not None:
            self._layer_inputs.pack(self._activation_dtype)
        self._final_norm.pack(self._activation_dtype)
        self._head.pack()
        if self._is_fused:
            self.fused = self._fuse()
        elif self._is_composed:
            self.composed = self._compose()
        else:
            self._loop = self._looped()

    def _adaptable(self, cpu_library: Library | None) -> AdaptableLayers:
        pack: Callable[[Tensor], Product] = PlainProduct
        dtype = self._activation_dtype
        if cpu_library is not None:
            pack, dtype = partial(product_of, cpu_library), cpu_library.dtype
        return AdaptableLayers(self._sites(), self.destinations(), self.sharding.share, dtype, pack)

    def _sites(self) -> dict[Linear, Site]:
        """The linear layers that adapters can add to."""
        found: dict[Linear, Site] = {}
        for index, layer in enumerate(self._layers):
            if isinstance(layer.mixer, Attention):
                qkv, o = layer.mixer.linears
                found |= {qkv: Site(index, LinearPart.QKV), o: Site(index, LinearPart.OUTPUT)}
            if isinstance(layer.feed, MLP):
                gate_up, down = layer.feed.linears
                found |= {
                    gate_up: Site(index, LinearPart.GATE_UP),
                    down: Site(index, LinearPart.DOWN),
                }
        return found

    def adapt(self, max_adapters: int, max_rank: int) -> "DeviceAdapters | None":
        """Takes memory for adapters on the device; None: nothing adds them to these layers there.

        Must be called when all kernels are chosen, and before a graph is captured.
        """
        if self.stack is None:
            return None
        from worker_svc.adapters.on_device import DeviceAdapters  # noqa: PLC0415 - needs Triton
        from worker_svc.models.adapted_stack import AdaptedStack  # noqa: PLC0415

        dtype, is_cuda = self._activation_dtype, self.device.type == "cuda"
        layout = PackedLayout(self.adaptable.targets, self._folded_norms(), dtype, pins=is_cuda)
        adapters = DeviceAdapters(layout, max_adapters, max_rank, self.device)
        if self.fused is None:
            self.adaptable.ask(adapters.add)
            self.adaptable.stack = AdaptedStack(self.stack, adapters)
        else:
            from worker_svc.models.fused import with_adapters  # noqa: PLC0415

            fused = with_adapters(self.fused, lambda site: partial(adapters.add, site))
            self.adaptable.stack = AdaptedStack(fused, adapters)
        return adapters

    @property
    def adapted(self) -> "AdaptedStack | None":
        """The stack for passes with rows that have adapters; None: see `adapt`."""
        return self.adaptable.stack

    def _folded_norms(self) -> dict[Site, Tensor]:
        """The weights of norms that are computed with the product after them."""
        if self.fused is None:
            return {}
        found = {}
        for index, layer in enumerate(self._layers):
            found[Site(index, LinearPart.QKV)] = layer.input_norm.weight
            found[Site(index, LinearPart.GATE_UP)] = layer.post_norm.weight
        return found

    @property
    def stack(self) -> LayerStack | None:
        """The layers that graphs record; None: a step is computed to its end when launched."""
        return self.composed if self.fused is None else self.fused

    @property
    def attention_backend(self) -> str:
        """Name of the attention implementation."""
        if self._compiled is not None:
            return f"c/{self._compiled.isa}"
        if self.composed is not None:
            return self.composed.attention.name
        if self.fused is None:
            return "torch"
        name = self.fused.attention.name
        return name if self.fused.one_row is None else f"{name}, cluster for one row"

    @property
    def settles_states(self) -> bool:
        """True: a step with drafts keeps what its recurrent layers are given."""
        return True

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of one sequence."""
        return row_bytes(self._state_shapes)

    @property
    def _state_shapes(self) -> Mapping[StateKey, StateShape]:
        return self.spec.states(self._activation_dtype)

    def make_states(self, max_num_seqs: int, num_snapshots: int) -> None:
        """Allocates the states of all slots, and snapshots of them, where there are any."""
        if self._state_shapes:
            shapes = self._state_shapes
            self.states = SlotStates(shapes, max_num_seqs, self.device, num_snapshots)

    def kv_layout(self, num_blocks: int, block_size: int) -> str:
        """The sizes of a cache of so many blocks, in words."""
        by_layers = [
            f"{[num_blocks, block_size, num_kv_heads, head_dim]}{of_layers}"
            for (num_kv_heads, head_dim), of_layers in self._cached_heads().items()
        ]
        return f"[num_blocks, block_size, num_kv_heads, head_dim] = {' and '.join(by_layers)}"

    def _cached_heads(self) -> Mapping[tuple[int, int], str]:
        """Numbers and sizes of KV heads, and of which layers they are, if layers differ."""
        heads = [(each.num_kv_heads, each.head_dim) for each in self.spec.stored]
        counts = Counter(heads)
        if len(counts) == 1:
            return {heads[0]: ""}
        return {each: f" of {count} layers" for each, count in counts.items()}

    def kv_plan(self, block_size: int, max_model_len: int) -> KvPlan | None:
        """The KV groups of layers with different windows; None: all layers have one table."""
        return self.spec.kv_plan(block_size, max_model_len, self.kv_dtype)

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one block over all layers that have keys and values."""
        return block_size * self.spec.kv_width * self.kv_dtype.itemsize

    def new_cache(self, num_blocks: int, block_size: int) -> KVCache | LayerCache:
        """An empty KV cache for this model."""
        if self.spec.has_latents or not self.spec.has_one_attention:
            shapes = [attention.kv_shape for attention in self.spec.stored]
            return LayerCache(shapes, num_blocks, block_size, self.kv_dtype, self.device)
        return KVCache(
            num_layers=len(self.kinds),
            num_blocks=num_blocks,
            block_size=block_size,
            num_kv_heads=self.heads.num_kv_heads,
            head_dim=self.heads.head_dim,
            dtype=self.kv_dtype,
            device=self.device,
            scales=self.kv_scales,
            key_offsets=self.key_offsets,
        )

    @torch.inference_mode()
    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv_cache: KVCache | LayerCache | PageCache,
        batch: AttentionBatch,
        last: LastTokens | None = None,
    ) -> Tensor:
        """Token ids and positions [T] of a step -> normed hidden states [T, hidden].

        With `last` (layers on CUDA only) the result has only the rows of those tokens, [R, hidden].
        """
        if batch.adapters is not None:
            assert self.adapted is not None  # else no row has an adapter
            return self.adapted.forward(token_ids, positions, kv_cache, batch, last)
        if self.composed is not None:
            return self.composed.forward(token_ids, positions, kv_cache, batch, last)
        if self.fused is not None:
            assert not isinstance(kv_cache, LayerCache)  # see `kernel_limits`
            return self.fused.forward(token_ids, positions, kv_cache, batch, last)
        assert last is None
        residual = self._embedding(token_ids)  # [T, hidden]
        if self._compiled is not None:
            assert not isinstance(kv_cache, LayerCache)  # see `kernel_limits`
            return self._compiled.forward(residual, positions, kv_cache, batch, self.adaptable.step)
        residual = residual.to(self._activation_dtype)
        step = AttentionStep(self._attention, batch, positions, kv_cache)
        states = None if self.states is None else StateStep(self.states, batch, positions)
        inputs = None
        if self._layer_inputs is not None:
            inputs = self._layer_inputs(token_ids, residual)
        return self._loop.run(residual, step, states, inputs)

    @torch.inference_mode()
    def vocab_part(self, hidden: Tensor) -> VocabPart:
        """Hidden states [R, hidden] -> logits of this rank's part of the vocabulary."""
        if self._compiled is not None:
            return VocabPart(self._final(self._compiled.logits(hidden)))
        head = self._head if self.fused is None else self.fused.head
        return VocabPart(self._final(head(hidden)), self.sharding.first_token, self.group)

    def _final(self, logits: Tensor) -> Tensor:
        if self.spec.logit_divisor != 1.0:
            logits = logits.div_(self.spec.logit_divisor)
        cap = self.spec.logit_softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [R, hidden] -> float32 [R, vocab]; every rank must call it (collective)."""
        return self.vocab_part(hidden).whole().float()

    def _embed(self) -> Embedding | IntegerEmbedding:
        grouped = self._table.grouped
        if grouped is None or self.device.type != "cpu" or self.group.size > 1:
            return self._float_embedding()
        return IntegerEmbedding(grouped, self.dtype, self.spec.embedding_scale)

    def _float_embedding(self) -> Embedding:
        first_token, scale = self.sharding.first_token, self.spec.embedding_scale
        return Embedding(self._table.weight, first_token, self.group, scale)

    def _loaded_library(self) -> Library | None:
        """The C kernels of this CPU, if they compute such layers; None: there are none, or others.

        They run from norm to norm in one call, in which there is no place for an all-reduce.
        """
        if self.device.type != "cpu" or self.group.size > 1:
            return None
        if lacking := kernel_limits.beyond_c(self.spec):
            logger.info("layers with %s are computed by torch", lacking)
            return None
        feeds = [layer.feed for layer in self.spec.layers]
        if not compiled.supports(self.heads, self.kinds) or not compiled.feeds(feeds):
            return None
        return library.load(self.dtype, kv_dtype=self.kv_dtype)

    def _expert_forms(self) -> Sequence[ExpertForm]:
        """The form in which each layer's experts are held.

        Codes of MXFP4 stay where kernels compute them.
        """
        quantization, count = self.spec.quantization, self.spec.num_layers
        if isinstance(quantization, Mxfp4):
            form = ExpertForm.CODES if self._keeps_codes() else ExpertForm.WIDENED
            return [form] * count
        if not isinstance(quantization, GgufTypes):
            return [ExpertForm.NUMBERS if quantization is None else ExpertForm.EMPTY] * count
        # Of integers only kernels of the CPU compute experts: elsewhere they are widened as read.
        form = ExpertForm.EMPTY if self.device.type == "cpu" else ExpertForm.NUMBERS
        if not quantization.mxfp4_layers or not self._keeps_codes():
            return [form] * count
        return [
            ExpertForm.CODES
            if index in quantization.mxfp4_layers and _may_be_codes(layer.feed)
            else form
            for index, layer in enumerate(self.spec.layers)
        ]

    def _keeps_codes(self) -> bool:
        return self._is_fused or self._loaded_library() is not None

    def _compile(self, cpu_library: Library) -> CompiledDecoder:
        layers = []
        while self._layers:  # one by one, to free plain weights early
            layer = self._layers.pop(0)
            assert isinstance(layer.feed, MLP | Experts)  # see `kernel_limits`
            layers.append(
                CompiledLayer.of(
                    cpu_library,
                    self.heads,
                    layer.input_norm,
                    layer.attention,
                    layer.post_norm,
                    layer.feed,
                    layer.output_norms,
                )
            )
        return CompiledDecoder(
            cpu_library,
            layers,
            self._final_norm.weight,
            self._head,
            self.spec.rms_norm_eps,
            self.heads,
            self._attention.ropes,
            self.kinds,
            head_rounding(self.spec.quantization),
        )

    def _looped(self) -> LayerLoop:
        """The layers one after the other."""
        layers, attending = [], 0
        for index, layer in enumerate(self._layers):
            parts = layer.input_norm, layer.mixer, layer.post_norm, layer.feed, layer.output_norms
            layers.append(LoopLayer(index, attending, *parts, layer.end))
            attending += isinstance(layer.mixer, Attention | LatentAttention)
        return LayerLoop(layers, self._final_norm, self.spec.residual_scale, self.group)

    def _compose(self) -> "ComposedStack":
        from worker_svc.models import composed  # noqa: PLC0415 - needs Triton

        return composed.ComposedStack(
            self._float_embedding(),
            self._looped(),
            self._attention,
            lambda: self.states,
            over_latents=self.spec.has_latents,
        )

    def _fuse(self) -> "FusedDecoder":
        from worker_svc.models import fused  # noqa: PLC0415 - needs Triton

        # See `kernel_limits`.
        feeds = [layer.feed for layer in self._layers if isinstance(layer.feed, MLP | Experts)]
        layers = [
            fused.FusedLayer.of(
                self.kinds[index],
                self._attention.ropes.layer(index),
                layer.input_norm,
                layer.attention,
                layer.post_norm,
                feed,
                layer.output_norms,
            )
            for index, (layer, feed) in enumerate(zip(self._layers, feeds, strict=True))
        ]
        return fused.FusedDecoder(
            self._float_embedding(),
            layers,
            self._final_norm.weight,
            self._head.weight,
            self.spec.rms_norm_eps,
            self.heads,
            self.group,
            self.spec.residual_scale,
        )


def _may_be_codes(feed: Feed | None) -> bool:
    """True if a rank's experts have whole blocks of MXFP4, and none is of every token."""
    return isinstance(feed, MoeSpec) and feed.shared is None and feed.intermediate_size % BLOCK == 0


def _per_token(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> Linear:
    """Weights [V, hidden]: a table of embeddings, or a head."""
    return Linear.empty(spec.hidden_size, spec.vocab_size, bias=False, dtype=dtype, device=device)
