"""A decoder as data: its sizes, and by layer how tokens attend and what feeds them forward.

Families make it out of a config.json; layers, caches and kernels are built from it. It knows
neither files nor numbers of weights.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from worker_svc.attention.batch import HeadLayout
from worker_svc.models.rope import RotaryConfig, YarnScaling
from worker_svc.quantization.scheme import Quantization


class UnsupportedModel(ValueError):
    """The model is not supported; the message names the field."""


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

    @property
    def heads(self) -> HeadLayout:
        """The division of its projection's rows."""
        return HeadLayout(self.num_heads, self.num_kv_heads, self.head_dim)


@dataclass(frozen=True, slots=True)
class MlpSpec:
    """down(silu(gate(x)) * up(x)), with weights of [intermediate_size, hidden_size]."""

    intermediate_size: int
    bias: bool = False


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """Experts, which are MLPs without biases, and a router that chooses some for each token.

    The router's logits become a softmax over all experts; the experts' outputs are added with the
    largest of its weights.
    """

    num_experts: int
    top_k: int  # the number of experts of a token
    intermediate_size: int  # of each expert
    renormalizes: bool  # True: the weights of a token's experts are divided by their sum


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """A norm and what mixes tokens, a norm and what feeds each token forward."""

    mixer: AttentionSpec
    feed: MlpSpec | MoeSpec

    @property
    def unrotated(self) -> "LayerSpec":
        """The same layer without its rotation, which changes no size and no weight."""
        return replace(self, mixer=replace(self.mixer, rope=None))


# The divided dimension of a checkpoint's tensor, by the end of its name; other tensors are whole on
# every rank. Rows of a weight are outputs, so the linear layer after a divided one is divided by
# its inputs.
DIVIDED = {
    "embed_tokens.weight": 0,
    "lm_head.weight": 0,
    "q_proj.weight": 0,
    "q_proj.bias": 0,
    "k_proj.weight": 0,
    "k_proj.bias": 0,
    "v_proj.weight": 0,
    "v_proj.bias": 0,
    "o_proj.weight": 1,
    "gate_proj.weight": 0,
    "gate_proj.bias": 0,
    "up_proj.weight": 0,
    "up_proj.bias": 0,
    "down_proj.weight": 1,
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
    post_norm: str = "post_attention_layernorm"
    mlp: str = "mlp"
    # In a layer's mlp, if it has experts:
    router: str = "gate"
    experts: str = "experts"  # followed by the expert's index
    expert_gate: str = "gate_proj"
    expert_up: str = "up_proj"
    expert_down: str = "down_proj"
    divided: Mapping[str, int] = field(default_factory=lambda: DIVIDED)

    def __post_init__(self) -> None:
        if self.head.rpartition(".")[2] != "lm_head":
            raise ValueError(f"head: {self.head} does not end in lm_head")

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
    checkpoint_dtype: str = "float32"
    eos_token_ids: tuple[int, ...] = ()
    quantization: Quantization | None = None  # None: the weights are plain numbers

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        return len(self.layers)

    @property
    def attention(self) -> AttentionSpec:
        """The attention that all layers have, apart from its rotation.

        Raises UnsupportedModel for a model whose attention differs by layer, where one shape of
        keys and values has to serve all.
        """
        shapes = list(dict.fromkeys(layer.unrotated.mixer for layer in self.layers))
        if len(shapes) > 1:
            raise UnsupportedModel(
                f"layers: {self.architecture} has attention of {len(shapes)} kinds, and all must "
                f"have one shape: {shapes[0]}, {shapes[1]}"
            )
        return shapes[0]

    @property
    def has_experts(self) -> bool:
        """True if a layer has experts in place of one MLP."""
        return any(isinstance(layer.feed, MoeSpec) for layer in self.layers)

    @property
    def uniform(self) -> LayerSpec:
        """The layer that all layers equal, apart from their rotation.

        Raises UnsupportedModel for a model whose layers differ, where one shape has to serve all.
        """
        shapes = list(dict.fromkeys(layer.unrotated for layer in self.layers))
        if len(shapes) > 1:
            raise UnsupportedModel(
                f"layers: {self.architecture} has layers of {len(shapes)} kinds, and all must have "
                f"one shape: {shapes[0]}, {shapes[1]}"
            )
        return shapes[0]

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
        """Raises UnsupportedModel for a length above the model's limit or a sliding window."""
        if not 1 <= max_model_len <= self.max_model_len:
            raise UnsupportedModel(
                f"max_model_len: {max_model_len} is not in 1..{self.max_model_len}, "
                "the model's own limit"
            )
        windows = {layer.mixer.window for layer in self.layers}
        window = min((each for each in windows if each is not None), default=max_model_len)
        if window < max_model_len:
            raise UnsupportedModel(
                f"sliding_window: attention over the last {window} tokens is not supported; a "
                f"max_model_len of at most {window} (now {max_model_len}) needs none"
            )

    def rehearsed(self) -> "ModelSpec":
        """The model of the few layers that stand for all of them in a rehearsal."""
        kinds = [layer.unrotated for layer in self.layers]
        return replace(self, layers=tuple(self.layers[index] for index in rehearsed(kinds)))


def rehearsed(kinds: Sequence[Hashable]) -> list[int]:
    """The indices of layers, given the kind of each, that launch every kernel of all of them.

    The first layer of each kind, and after them one of the kind of the last layer, since a last
    layer is computed for fewer rows.
    """
    firsts = sorted({kinds.index(kind) for kind in kinds})
    later = (index for index in range(firsts[-1] + 1, len(kinds)) if kinds[index] == kinds[-1])
    return [*firsts, *list(later)[:1]]
