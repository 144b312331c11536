"""A decoder as data: its sizes, and by layer how tokens attend and what feeds them forward.

Families make it out of a config.json; layers, caches and kernels are built from it. It knows
neither files nor numbers of weights.
"""

import logging
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

import torch

from kernels import fp8
from kernels.attention_kind import AttentionKind
from kernels.expert_clamp import Clamp
from worker_svc.attention.batch import HeadLayout
from worker_svc.attention.kv_plan import KvPlan, plan_of
from worker_svc.attention.layer_cache import KvShape
from worker_svc.models.rope import RotaryConfig, YarnScaling
from worker_svc.quantization.scheme import Quantization
from worker_svc.states.slots import StateKey, StateShape

logger = logging.getLogger(__name__)

CONV, RECURRENT = "conv", "recurrent"  # names of a layer's states


class UnsupportedModel(ValueError):
    """The model is not supported; the message names the field."""


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Keys and values of all heads that are products of one latent, and a rotated key of all heads.

    The cache holds the latent and the rotated key, and no values.
    """

    size: int  # of the latent
    rope_dim: int  # of the rotated key, and of the rotated part of a query
    nope_dim: int  # of the part that is not rotated
    v_dim: int  # of a head's value
    query_size: int | None  # of a latent that queries are products of; None: they are of hidden
    is_interleaved: bool  # pairs that turn are next to each other


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Attention over the tokens so far, with keys and values in the cache."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: str | None  # which of the model's rotations; None: queries and keys are not rotated
    window: int | None = None  # in tokens; None: attention over all tokens
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False  # of the queries and keys of each head, before the rotation
    norms_all_heads: bool = False  # the QK norm is one of all heads' queries, and one of all keys
    scale: float | None = None  # of the scores; None: that of the head size
    softcap: float | None = None  # of the scores; None: they stay
    has_sinks: bool = False  # each head has a score that takes its share, and has no value
    is_gated: bool = False  # a sigmoid of more outputs of the queries' projection gates its outputs
    v_norm: bool = False  # of each head's values, without a weight
    v_is_k: bool = False  # values are the keys before their norm and rotation
    # The layer has no keys and values: it reads those of the last layer before it that has some, of
    # the same shape and with the same window.
    shares_kv: bool = False

    # Then there is one KV head, whose keys are latents and rotated keys: `head_dim` is their size.
    latent: LatentSpec | None = None

    @property
    def rotary_dim(self) -> int:
        """The dimensions among which those that are rotated are the first."""
        return self.head_dim if self.latent is None else self.latent.rope_dim

    @property
    def kv_shape(self) -> KvShape:
        """Keys and values of a token in the cache."""
        if self.latent is None:
            return KvShape(self.num_kv_heads, self.head_dim, self.head_dim)
        return KvShape(self.num_kv_heads, self.head_dim, self.latent.size, is_latent=True)

    def kind(self, max_model_len: int) -> AttentionKind:
        """The way in which it attends in contexts of up to this length."""
        scale = self.heads.scale if self.scale is None else self.scale
        kind = AttentionKind(scale, self.window, softcap=self.softcap, has_sinks=self.has_sinks)
        return kind.within(max_model_len)

    @property
    def shape(self) -> "AttentionSpec":
        """The attention without all that changes no size and no weight."""
        return replace(self, rope=None, window=None, scale=None, softcap=None)

    @property
    def heads(self) -> HeadLayout:
        """The division of its projection's rows."""
        return HeadLayout(self.num_heads, self.num_kv_heads, self.head_dim)


@dataclass(frozen=True, slots=True)
class DeltaNetSpec:
    """A gated delta net: a convolution over the last tokens, and a state that each token corrects.

    It has no keys and values in the cache. Consecutive value heads share a key head.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int  # of a head
    value_dim: int  # of a head
    width: int  # of the convolution, in tokens, its own among them
    # True: one tensor has queries, keys, values and gates, by key head, another both step sizes.
    is_grouped: bool = False

    @property
    def sections(self) -> tuple[int, int, int]:
        """The channels of all queries, keys and values, in the order of the convolution."""
        keys = self.num_key_heads * self.key_dim
        return keys, keys, self.num_value_heads * self.value_dim

    @property
    def divided_sections(self) -> Mapping[str, tuple[int, ...]]:
        """The rows of sections of which each is divided among ranks, by the ends of names."""
        of_heads = ("in_proj_qkv.weight", "conv1d.weight")
        return dict.fromkeys(of_heads, self.sections)

    def states(self, dtype: torch.dtype) -> Mapping[str, StateShape]:
        """The states of a sequence, where activations have this type."""
        shape = self.num_value_heads, self.key_dim, self.value_dim
        return {
            CONV: StateShape((sum(self.sections), self.width - 1), dtype),
            RECURRENT: StateShape(shape, torch.float32),
        }


@dataclass(frozen=True, slots=True)
class ShortConvSpec:
    """A gated convolution of each channel over the last tokens, with a state of those before."""

    channels: int
    width: int  # in tokens, the newest one among them
    bias: bool = False  # of the convolution and both projections

    @property
    def divided_sections(self) -> Mapping[str, tuple[int, ...]]:
        """The rows of sections of which each is divided among ranks, by the ends of names."""
        return dict.fromkeys(("in_proj.weight", "in_proj.bias"), (self.channels,) * 3)

    def states(self, dtype: torch.dtype) -> Mapping[str, StateShape]:
        """The states of a sequence, where activations have this type."""
        return {CONV: StateShape((self.channels, self.width - 1), dtype)}


@dataclass(frozen=True, slots=True)
class Mamba2Spec:
    """Mamba-2: a convolution, then a recurrent state of [head_dim, state_size] a head."""

    num_heads: int
    head_dim: int
    num_groups: int  # of heads that share what is written to states and read from them
    state_size: int
    width: int  # of the convolution, in tokens
    norm_eps: float
    conv_bias: bool = True
    bias: bool = False  # of both projections

    @property
    def inner_size(self) -> int:
        """The width of all heads."""
        return self.num_heads * self.head_dim

    @property
    def num_channels(self) -> int:
        """The channels of the convolution: inputs of heads, and what groups write and read."""
        return self.inner_size + 2 * self.num_groups * self.state_size

    @property
    def divided_sections(self) -> Mapping[str, tuple[int, ...]]:
        """The rows of sections of which each is divided among ranks, by the ends of names."""
        of_groups = self.num_groups * self.state_size
        conv = self.inner_size, of_groups, of_groups
        projections = self.inner_size, *conv, self.num_heads
        return {
            "in_proj.weight": projections,
            "in_proj.bias": projections,
            "conv1d.weight": conv,
            "conv1d.bias": conv,
        }

    def states(self, dtype: torch.dtype) -> Mapping[str, StateShape]:
        """The states of a sequence, where activations have this type."""
        shape = self.num_heads, self.head_dim, self.state_size
        return {
            CONV: StateShape((self.num_channels, self.width - 1), dtype),
            RECURRENT: StateShape(shape, torch.float32),
        }


# A mixer whose sequences have states in place of keys and values.
RecurrentSpec = DeltaNetSpec | ShortConvSpec | Mamba2Spec


class Activation(Enum):
    """The function of an MLP; the values are those of config.json."""

    SILU = "silu"
    GELU_TANH = "gelu_pytorch_tanh"  # with its approximation by tanh
    RELU2 = "relu2"  # the square of what is above 0

    @property
    def has_gate(self) -> bool:
        """True if it is the gate's, and the product is multiplied; else it is of the product up."""
        return self is not Activation.RELU2


@dataclass(frozen=True, slots=True)
class MlpSpec:
    """down(act(gate(x)) * up(x)), with weights of [intermediate_size, hidden_size].

    Without a gate it is down(act(up(x))).
    """

    intermediate_size: int
    bias: bool = False
    activation: Activation = Activation.SILU


@dataclass(frozen=True, slots=True)
class RouterSpec:
    """The rule by which a router chooses experts for a token: see `reference.choose_experts`."""

    num_experts: int  # that are chosen among
    top_k: int  # the number of those that are chosen
    renormalizes: bool  # True: the weights of a token's experts are divided by their sum
    is_sigmoid: bool = False  # scores are sigmoids of the logits; else a softmax
    has_bias: bool = False  # scores are chosen with a bias, which weights do not have
    has_logit_bias: bool = False  # the logits have a bias
    scale: float = 1.0  # of the weights
    epsilon: float = 1e-20  # that is added to the sum
    num_groups: int = 1  # of consecutive experts
    kept_groups: int = 1  # those of them that a token chooses from


@dataclass(frozen=True, slots=True)
class SharedSpec:
    """An expert of every token, as wide as several of the others."""

    count: int  # of the others that it is as wide as
    is_gated: bool  # its weight is a sigmoid of a product with the token; else it is 1


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """Experts, which are MLPs, and a router that chooses some for each token."""

    router: RouterSpec
    intermediate_size: int  # of each expert
    shared: SharedSpec | None = None
    bias: bool = False  # of both products of an expert
    clamp: Clamp | None = None  # of gate and up; None: the activation
    activation: Activation = Activation.SILU


@dataclass(frozen=True, slots=True)
class MlpAndExpertsSpec:
    """An MLP and experts, each with norms of its own; their outputs are added."""

    mlp: MlpSpec
    experts: MoeSpec  # the router reads the residual, and scales the weights of each expert


Feed = MlpSpec | MoeSpec | MlpAndExpertsSpec


def experts_of(feed: Feed | None) -> MoeSpec | None:
    """The experts of a layer that is fed so; None: it has none."""
    if isinstance(feed, MlpAndExpertsSpec):
        return feed.experts
    return feed if isinstance(feed, MoeSpec) else None


@dataclass(frozen=True, slots=True)
class LayerInputsSpec:
    """A vector for each token and layer, apart from the residual."""

    size: int
    vocab_size: int  # rows of the table


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """A norm and what mixes tokens, a norm and what feeds each token forward.

    A layer has one of the two, or both.
    """

    mixer: AttentionSpec | RecurrentSpec | None
    feed: Feed | None
    norms_outputs: bool = False  # True: what each of the two returns is normed before it is added
    has_factor: bool = False  # after the layer the residual is multiplied by a number

    @property
    def attention(self) -> AttentionSpec:
        """Its attention, for layers that have it."""
        assert isinstance(self.mixer, AttentionSpec)
        return self.mixer

    @property
    def unrotated(self) -> "LayerSpec":
        """The same layer without its rotation, which changes no size and no weight."""
        if not isinstance(self.mixer, AttentionSpec):
            return self
        return replace(self, mixer=replace(self.mixer, rope=None))

    @property
    def shape(self) -> "LayerSpec":
        """The layer without all that changes no size and no weight."""
        if not isinstance(self.mixer, AttentionSpec):
            return self
        return replace(self, mixer=self.mixer.shape)


# The divided dimension of a checkpoint's tensor, by the end of its name; other tensors are whole on
# every rank. Rows of a weight are outputs, so the linear layer after a divided one is divided by
# its inputs.
DIVIDED = {
    "embed_tokens.weight": 0,
    "embed_tokens_per_layer.weight": 0,
    "lm_head.weight": 0,
    "q_proj.weight": 0,
    "q_proj.bias": 0,
    "k_proj.weight": 0,
    "k_proj.bias": 0,
    "v_proj.weight": 0,
    "v_proj.bias": 0,
    "o_proj.weight": 1,
    "q_b_proj.weight": 0,
    "kv_b_proj.weight": 0,
    "gate_proj.weight": 0,
    "gate_proj.bias": 0,
    "up_proj.weight": 0,
    "up_proj.bias": 0,
    "down_proj.weight": 1,
    "self_attn.sinks": 0,
    "in_proj_qkv.weight": 0,
    "in_proj_qkvz.weight": 0,
    "in_proj_z.weight": 0,
    "in_proj_a.weight": 0,
    "in_proj_b.weight": 0,
    "in_proj_ba.weight": 0,
    "conv1d.weight": 0,
    "linear_attn.A_log": 0,
    "linear_attn.dt_bias": 0,
    "out_proj.weight": 1,
    # Of all experts in one tensor; those in MXFP4 have rows of outputs.
    "experts.gate_up_proj": 2,
    "experts.gate_up_proj_bias": 1,
    "experts.gate_up_proj_blocks": 1,
    "experts.gate_up_proj_scales": 1,
    "experts.down_proj": 1,
    "experts.down_proj_blocks": 2,
    "experts.down_proj_scales": 2,
}


@dataclass(frozen=True, slots=True)
class TensorNames:
    """A checkpoint's names of the parts of the model, and how ranks divide its tensors.

    The defaults are the layout of Llama, which most families share.
    """

    embedding: str = "model.embed_tokens"
    layers: str = "model.layers"  # followed by the index
    final_norm: str = "model.norm"
    head: str = "lm_head"  # ends so in all: quantization knows it by that
    # In a layer:
    input_norm: str = "input_layernorm"
    attention: str = "self_attn"
    recurrent: str = "linear_attn"  # in place of attention
    post_norm: str = "post_attention_layernorm"
    mlp: str = "mlp"
    # In a layer's attention:
    q_norm: str = "q_norm"
    k_norm: str = "k_norm"
    attention_output: str = "o_proj"
    # In a layer's mlp:
    mlp_gate: str = "gate_proj"
    mlp_up: str = "up_proj"
    mlp_down: str = "down_proj"
    mlp_gate_up: str | None = None  # one tensor of both, one after the other, in place of two
    # In a layer's mlp, if it has experts:
    router: str = "gate"
    router_bias: str = "gate.e_score_correction_bias"  # that experts are chosen with
    logit_bias: str = "gate.bias"
    shared_expert: str = "shared_expert"
    shared_gate: str = "shared_expert_gate"
    experts: str = "experts"  # followed by the expert's index
    expert_gate: str = "gate_proj"
    expert_up: str = "up_proj"
    expert_down: str = "down_proj"
    # True: one tensor has a weight of all experts, [E, inputs, outputs], where outputs of gate and
    # up alternate.
    stacks_experts: bool = False
    expert_gate_up: str = "gate_up_proj"
    # The tensors of all experts, gate before up, and down, each [E, outputs, inputs]; None: others.
    stacks_outputs: tuple[str, str] | None = None
    shared_mlp: str | None = None  # of a shared expert that is no part of the mlp
    # In a layer that norms outputs:
    attention_output_norm: str = "post_attention_layernorm"
    mlp_output_norm: str = "post_feedforward_layernorm"
    divided: Mapping[str, int] = field(default_factory=lambda: DIVIDED)

    def under(self, prefix: str) -> "TensorNames":
        """These names below another one, the head's, too."""
        return replace(
            self,
            embedding=f"{prefix}.{self.embedding}",
            layers=f"{prefix}.{self.layers}",
            final_norm=f"{prefix}.{self.final_norm}",
            head=f"{prefix}.{self.head}",
        )

    @property
    def of_text(self) -> "TensorNames":
        """Llama's layout in a checkpoint with pictures, as transformers writes it."""
        text = "model.language_model"
        return replace(
            self,
            embedding=f"{text}.embed_tokens",
            layers=f"{text}.layers",
            final_norm=f"{text}.norm",
        )

    @property
    def of_experts_apart(self) -> "TensorNames":
        """These names in a file that has tensors of each expert."""
        return replace(self, stacks_experts=False, stacks_outputs=None)

    def __post_init__(self) -> None:
        if self.head.rpartition(".")[2] != "lm_head":
            raise ValueError(f"head: {self.head} does not end in lm_head")

    def fit(self, stored: Collection[str]) -> bool:
        """True if a checkpoint with these tensors has such names."""
        if self.stacks_outputs is not None:
            end = f"{self.mlp}.{self.stacks_outputs[0]}"
            if not any(name.endswith(end) for name in stored):
                return False
        return self.embedding_weight in stored or self.head_weight in stored

    @property
    def embedding_weight(self) -> str:
        """The tensor of the embedding table."""
        return f"{self.embedding}.weight"

    @property
    def head_weight(self) -> str:
        """The tensor of the head, which a model may lack."""
        return f"{self.head}.weight"


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder: an embedding table, layers with a residual connection, a norm and a head."""

    architecture: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    ropes: Mapping[str, RotaryConfig]  # by the names that layers give
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    names: TensorNames = field(default_factory=TensorNames)
    other_names: tuple[TensorNames, ...] = ()  # that some checkpoints have in place of `names`
    # Tensors of other parts of the checkpoint, which are not read: a regular expression.
    other_parts: str = ""
    checkpoint_dtype: str = "float32"
    eos_token_ids: tuple[int, ...] = ()
    quantization: Quantization | None = None  # None: the weights are plain numbers
    embedding_scale: float = 1.0  # of the rows of the table
    norm_offset: float = 0.0  # the weights of norms are stored less this
    residual_scale: float = 1.0  # of what a mixer or a feed returns, before it is added
    logit_divisor: float = 1.0  # of logits
    logit_softcap: float | None = None  # logits become softcap * tanh(logit / softcap)
    layer_inputs: LayerInputsSpec | None = None
    # A window that the configuration names, and that the family does not apply to its layers: no
    # longer context is served. None: it names none.
    unsure_window: int | None = None

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        return len(self.layers)

    @property
    def attentions(self) -> tuple[AttentionSpec, ...]:
        """The attention of each layer that has any."""
        mixers = (layer.mixer for layer in self.layers)
        return tuple(mixer for mixer in mixers if isinstance(mixer, AttentionSpec))

    @property
    def stored(self) -> tuple[AttentionSpec, ...]:
        """The attention of each layer that has keys and values of its own."""
        return tuple(mixer for mixer in self.attentions if not mixer.shares_kv)

    @property
    def kv_width(self) -> int:
        """Numbers of a token's keys and values in all layers."""
        return sum(attention.kv_shape.width for attention in self.stored)

    @property
    def has_states(self) -> bool:
        """True if a sequence has states besides keys and values."""
        return any(isinstance(layer.mixer, RecurrentSpec) for layer in self.layers)

    def states(self, dtype: torch.dtype) -> Mapping[StateKey, StateShape]:
        """The states of a sequence in all layers, where activations have this type."""
        return {
            StateKey(index, name): shape
            for index, layer in enumerate(self.layers)
            if isinstance(layer.mixer, RecurrentSpec)
            for name, shape in layer.mixer.states(dtype).items()
        }

    @property
    def attention(self) -> AttentionSpec:
        """The attention of all layers that have any, apart from what changes no size.

        Raises UnsupportedModel for a model whose attention differs by layer, where one shape of
        keys and values has to serve all.
        """
        shapes = list(dict.fromkeys(mixer.shape for mixer in self.attentions))
        if len(shapes) != 1:
            kinds = f": {shapes[0]}, {shapes[1]}" if shapes else ""
            raise UnsupportedModel(
                f"layers: {self.architecture} has attention of {len(shapes)} kinds, and all must "
                f"have one shape{kinds}"
            )
        return shapes[0]

    @property
    def has_one_attention(self) -> bool:
        """True if attention of all layers has one shape; then `attention` is it."""
        return len({mixer.shape for mixer in self.attentions}) == 1

    @property
    def has_latents(self) -> bool:
        """True if the cache of a layer holds latents."""
        return any(mixer.latent is not None for mixer in self.attentions)

    @property
    def has_experts(self) -> bool:
        """True if a layer has experts in place of one MLP."""
        return any(experts_of(layer.feed) is not None for layer in self.layers)

    @property
    def has_expert_groups(self) -> bool:
        """True if tokens choose experts from some groups of them."""
        feeds = (experts_of(layer.feed) for layer in self.layers)
        return any(
            feed is not None and feed.router.kept_groups < feed.router.num_groups for feed in feeds
        )

    @property
    def rotates_in_part(self) -> bool:
        """True if layers may rotate the first dimensions of a head alone."""
        return any(rope.part < 1 for rope in self.ropes.values())

    @property
    def uniform(self) -> LayerSpec:
        """The layer that all layers equal in shape.

        Raises UnsupportedModel for a model whose layers differ, where one shape has to serve all.
        """
        shapes = list(dict.fromkeys(layer.shape for layer in self.layers))
        if len(shapes) > 1:
            raise UnsupportedModel(
                f"layers: {self.architecture} has layers of {len(shapes)} kinds, and all must have "
                f"one shape: {shapes[0]}, {shapes[1]}"
            )
        return shapes[0]

    @property
    def uniform_feed(self) -> MlpSpec | MoeSpec:
        """The MLP or experts of all layers. Raises UnsupportedModel as `uniform`."""
        feed = self.uniform.feed
        if feed is None or isinstance(feed, MlpAndExpertsSpec):
            raise UnsupportedModel(
                f"layers: those of {self.architecture} have no MLP, or one and experts"
            )
        return feed

    @property
    def max_model_len(self) -> int:
        """Longest context in tokens, after YaRN scaling."""
        scalings = [rope.scaling for rope in self.ropes.values()]
        stretched = [
            int(each.factor * each.original_max_position_embeddings)
            for each in scalings
            if isinstance(each, YarnScaling)
        ]
        return max([self.max_position_embeddings, *stretched])

    def check_length(self, max_model_len: int) -> None:
        """Raises UnsupportedModel for a length above the model's limit, or `unsure_window`."""
        if not 1 <= max_model_len <= self.max_model_len:
            raise UnsupportedModel(
                f"max_model_len: {max_model_len} is not in 1..{self.max_model_len}, "
                "the model's own limit"
            )
        window = self.unsure_window
        if window is not None and window < max_model_len:
            raise UnsupportedModel(
                f"sliding_window: attention over the last {window} tokens is not supported; a "
                f"max_model_len of at most {window} (now {max_model_len}) needs none"
            )

    def named_as(self, stored: Collection[str]) -> "ModelSpec":
        """The model with those of its names under which a checkpoint has these tensors."""
        for names in (self.names, *self.other_names):
            if names.fit(stored):
                return replace(self, names=names)
        return self

    def kv_plan(self, block_size: int, max_model_len: int, dtype: torch.dtype) -> KvPlan | None:
        """The KV groups of layers with different windows; None: all layers have one table."""
        windows = [attention.kind(max_model_len).window for attention in self.stored]
        # No family has both windows and states, so nothing shows that they go together.
        if not any(windows) or self.has_states:
            return None
        if fp8.is_fp8(dtype):
            logger.warning(
                "a cache in FP8 has one block table: layers with windows keep all tokens"
            )
            return None
        return plan_of([each.kv_shape for each in self.stored], windows, block_size, dtype)

    @property
    def rehearsed_layers(self) -> list[int]:
        """The few layers that stand for all of them in a rehearsal."""
        return rehearsed([layer.unrotated for layer in self.layers])

    def rehearsed(self) -> "ModelSpec":
        """The model of the layers of a rehearsal alone."""
        return replace(self, layers=tuple(self.layers[index] for index in self.rehearsed_layers))


def stored_places(attentions: Sequence[AttentionSpec]) -> tuple[int, ...]:
    """The index, among those that have some, of the keys and values that each attention reads."""
    places, last, count = [], {}, 0
    for mixer in attentions:
        kind = mixer.window, mixer.kv_shape
        if not mixer.shares_kv:
            last[kind], count = count, count + 1
        places.append(last[kind])
    return tuple(places)


def rehearsed(kinds: Sequence[Hashable]) -> list[int]:
    """The indices of layers, given the kind of each, that launch every kernel of all of them.

    The first layer of each kind, and after them one of the kind of the last layer, since a last
    layer is computed for fewer rows.
    """
    firsts = sorted({kinds.index(kind) for kind in kinds})
    later = (index for index in range(firsts[-1] + 1, len(kinds)) if kinds[index] == kinds[-1])
    return [*firsts, *list(later)[:1]]
