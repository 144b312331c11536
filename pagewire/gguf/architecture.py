"""The decoders that are read out of GGUF files: names, shapes and forms of their tensors."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pagewire.gguf.header import GgufHeader, GgufTensor

ARCHITECTURE = "general.architecture"
EMBEDDING, HEAD, ROPE_FACTORS = "token_embd.weight", "output.weight", "rope_freqs.weight"
OUTER = {
    EMBEDDING: "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    HEAD: "lm_head.weight",
}
# Of a layer: the name here, and in a Hugging Face folder. Each may have a bias.
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
# Of a layer that normalizes what goes into attention and MLP, and what comes out of them.
NORMS_ON_BOTH_SIDES = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
# Of a layer with a gated delta net in place of attention: see `delta_nets`.
DELTA_NET = {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt": "linear_attn.dt_bias",
}
# Of LFM2, whose layers have a short convolution or attention: see `short_convs`.
LFM2 = {
    "attn_norm": "operator_norm",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.conv": "conv.conv",
    "shortconv.out_proj": "conv.out_proj",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
}
CONVS, NORM_WITHOUT_OFFSET = ("ssm_conv1d", "shortconv.conv"), "ssm_norm"
DRAFTING = "nextn_predict_layers"  # layers after the last one, which are not read
QUERIES, KEYS = "attn_q", "attn_k"
QUERY_BIAS = "blk.0.attn_q.bias"
MLP = ("ffn_gate", "ffn_up", "ffn_down")
EXPERTS = "expert_count"
SINKS = "attn_sinks"  # of attention, a number for each head
WHOLE_NAMES = (SINKS, "ssm_a", "ssm_dt")  # that end in no `.weight` in a Hugging Face folder
# In place of an MLP: a router, and weights of all experts in one tensor.
ROUTER = "ffn_gate_inp"
EXPERT_GATE, EXPERT_UP, EXPERT_DOWN = "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"
SHARED_GATE = "ffn_gate_inp_shexp"
SHARED = {
    SHARED_GATE: "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}


@dataclass(frozen=True, slots=True)
class GgufExperts:
    """The experts of a family: their tensors' names in a Hugging Face folder, and their keys."""

    router: str = "mlp.gate"
    each: str = "mlp.experts"  # followed by the expert's index
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    count: str = "num_experts"  # of config.json, as the next one
    size: str = "moe_intermediate_size"
    has_shared: bool = False  # an expert of every token, with a gate

    @property
    def parts(self) -> Mapping[str, str]:
        """The tensors of all experts, and the part of an expert that each holds."""
        return {EXPERT_GATE: self.gate, EXPERT_UP: self.up, EXPERT_DOWN: self.down}


@dataclass(frozen=True, slots=True)
class GgufArchitecture:
    """A family of models under GGUF's name.

    The file's form is read here; what its config.json means, the worker's families say.
    """

    name: str  # in GGUF
    model_class: str
    model_type: str  # of config.json
    swaps_rows: bool = False  # rows of queries and keys are in the order of neighbouring pairs
    has_qk_norms: bool = False
    switches: Mapping[str, str] = field(default_factory=dict)  # of config.json: on with this tensor
    norms_both_sides: bool = False
    # Weights of norms are stored as they are multiplied with; a Hugging Face folder has one less.
    adds_one_to_norms: bool = False
    feed_norm: str = "ffn_norm"  # before an MLP or experts
    has_sinks: bool = False
    has_biases: bool = False  # of all matrices of a layer; others may have some
    has_delta_nets: bool = False  # in some layers, in place of attention
    gates_attention: bool = False  # queries are twice as many rows
    has_short_convs: bool = False  # in some layers, in place of attention
    own_names: Mapping[str, str] = field(default_factory=dict)  # of a layer's tensors
    # The tensors of no layer, here and in a Hugging Face folder.
    outer_names: Mapping[str, str] = field(default_factory=lambda: OUTER)
    experts: GgufExperts | None = None  # of all layers; None: each has an MLP
    ends: tuple[str, ...] = ()  # tokens that end an output besides those that a file names
    # Members of config.json that no file says, since all models of the architecture have them.
    constants: Mapping[str, Any] = field(default_factory=dict)
    # Keys that files may have although the architecture decides, and the only value it has.
    fixed: Mapping[str, Any] = field(default_factory=dict)

    @property
    def layer_names(self) -> Mapping[str, str]:
        """The tensors of a layer, here and in a Hugging Face folder, without `.weight`.

        Those of all experts are not among them.
        """
        names = {
            self.feed_norm if kind == "ffn_norm" else kind: name for kind, name in LAYER.items()
        }
        names |= QK_NORMS if self.has_qk_norms else {}
        names |= NORMS_ON_BOTH_SIDES if self.norms_both_sides else {}
        names |= {SINKS: "self_attn.sinks"} if self.has_sinks else {}
        names |= DELTA_NET if self.has_delta_nets else {}
        names |= self.own_names
        if self.experts is None:
            return names
        of_others = {kind: name for kind, name in names.items() if kind not in MLP}
        of_others |= SHARED if self.experts.has_shared else {}
        return of_others | {ROUTER: self.experts.router}


# A softmax of the router's logits, of which the largest are divided by their sum.
RENORMALIZED = {"expert_gating_func": 1, "expert_weights_norm": True}

# Mistral's models are `llama` in GGUF: apart from their attention window they compute the same.
ARCHITECTURES = {
    each.name: each
    for each in (
        GgufArchitecture(
            "llama",
            "LlamaForCausalLM",
            "llama",
            swaps_rows=True,
            switches={"attention_bias": QUERY_BIAS, "mlp_bias": "blk.0.ffn_gate.bias"},
        ),
        GgufArchitecture("qwen2", "Qwen2ForCausalLM", "qwen2"),  # has its biases without a switch
        GgufArchitecture(
            "qwen3",
            "Qwen3ForCausalLM",
            "qwen3",
            has_qk_norms=True,
            switches={"attention_bias": QUERY_BIAS},
        ),
        GgufArchitecture(
            "qwen3moe",
            "Qwen3MoeForCausalLM",
            "qwen3_moe",
            has_qk_norms=True,
            switches={"attention_bias": QUERY_BIAS},
            experts=GgufExperts(),
            constants={"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
            fixed=RENORMALIZED,
        ),
        # The first layer has a window, and then every second one: see `gpt_oss`.
        GgufArchitecture(
            "gpt-oss",
            "GptOssForCausalLM",
            "gpt_oss",
            feed_norm="post_attention_norm",
            has_sinks=True,
            has_biases=True,
            experts=GgufExperts("mlp.router", count="num_local_experts", size="intermediate_size"),
            ends=("<|return|>", "<|endoftext|>", "<|call|>"),
            constants={"attention_bias": True, "swiglu_limit": 7.0},
        ),
        GgufArchitecture(
            "qwen2moe",
            "Qwen2MoeForCausalLM",
            "qwen2_moe",
            experts=GgufExperts(has_shared=True),
            constants={"norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
            fixed={"expert_gating_func": 1, "expert_weights_norm": False},
        ),
        GgufArchitecture(
            "qwen35",
            "Qwen3_5ForCausalLM",
            "qwen3_5_text",
            has_qk_norms=True,
            adds_one_to_norms=True,
            feed_norm="post_attention_norm",
            has_delta_nets=True,
            gates_attention=True,
        ),
        GgufArchitecture(
            "qwen35moe",
            "Qwen3_5MoeForCausalLM",
            "qwen3_5_moe_text",
            has_qk_norms=True,
            adds_one_to_norms=True,
            feed_norm="post_attention_norm",
            has_delta_nets=True,
            gates_attention=True,
            experts=GgufExperts(has_shared=True),
            fixed=RENORMALIZED,
        ),
        GgufArchitecture(
            "lfm2",
            "Lfm2ForCausalLM",
            "lfm2",
            has_qk_norms=True,
            has_short_convs=True,
            own_names=LFM2,
            outer_names={
                EMBEDDING: "model.embed_tokens.weight",
                "token_embd_norm.weight": "model.embedding_norm.weight",
                HEAD: "lm_head.weight",
            },
            # The size of an MLP is the one that it has.
            constants={"block_auto_adjust_ff_dim": False, "conv_bias": False},
        ),
        # Every fourth layer does not rotate.
        GgufArchitecture(
            "smollm3",
            "SmolLM3ForCausalLM",
            "smollm3",
            swaps_rows=True,
            switches={"attention_bias": QUERY_BIAS, "mlp_bias": "blk.0.ffn_gate.bias"},
            constants={"no_rope_layer_interval": 4, "use_sliding_window": False},
        ),
        GgufArchitecture(
            "gemma",
            "GemmaForCausalLM",
            "gemma",
            adds_one_to_norms=True,
            switches={"attention_bias": QUERY_BIAS},
        ),
        GgufArchitecture(
            "gemma2",
            "Gemma2ForCausalLM",
            "gemma2",
            norms_both_sides=True,
            adds_one_to_norms=True,
            switches={"attention_bias": QUERY_BIAS},
        ),
        GgufArchitecture(
            "gemma3",
            "Gemma3ForCausalLM",
            "gemma3_text",
            has_qk_norms=True,
            norms_both_sides=True,
            adds_one_to_norms=True,
            switches={"attention_bias": QUERY_BIAS},
        ),
    )
}

# Llamas with experts are Mixtral's.
MIXTRAL = GgufArchitecture(
    "llama",
    "MixtralForCausalLM",
    "mixtral",
    swaps_rows=True,
    experts=GgufExperts(
        "block_sparse_moe.gate",
        "block_sparse_moe.experts",
        gate="w1",
        up="w3",
        down="w2",
        count="num_local_experts",
        size="intermediate_size",
    ),
    fixed=RENORMALIZED,
)


def architecture_of(header: GgufHeader) -> GgufArchitecture:
    """The model's family. Raises BadGguf for one that is not read here."""
    name = header.require(ARCHITECTURE, str)
    if name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        header.refuse(f"{ARCHITECTURE}: {name!r} is not supported; supported are {known}")
    if name == MIXTRAL.name and f"{name}.{EXPERTS}" in header.metadata:
        return MIXTRAL
    return ARCHITECTURES[name]


def weights(header: GgufHeader) -> dict[str, GgufTensor]:
    """The file's tensors by their names in a Hugging Face folder. Raises BadGguf."""
    architecture = architecture_of(header)
    names, experts = architecture.layer_names, architecture.experts
    outer = architecture.outer_names
    found: dict[str, GgufTensor] = {}
    for name, tensor in header.tensors.items():
        if name in outer:
            found[outer[name]] = tensor
        elif name != ROPE_FACTORS and not is_draft(header, name):
            layer, kind, end = _split(header, name)
            if kind in names and kind in WHOLE_NAMES:
                found[f"model.layers.{layer}.{names[kind]}"] = tensor
            elif kind in names:
                found[f"model.layers.{layer}.{names[kind]}.{end}"] = _shaped(kind, tensor)
            elif experts is not None and kind in experts.parts:
                prefix = f"model.layers.{layer}.{experts.each}"
                for index, part in enumerate(tensor.slices()):
                    found[f"{prefix}.{index}.{experts.parts[kind]}.{end}"] = part
            else:
                header.refuse(f"tensor {name} is not supported")
    return found


def added(header: GgufHeader, tensor: GgufTensor) -> float:
    """The number that is added to those of a tensor, which gives a Hugging Face folder's."""
    is_norm = tensor.name.endswith("norm.weight") and kind_of(tensor.name) != NORM_WITHOUT_OFFSET
    return -1.0 if is_norm and architecture_of(header).adds_one_to_norms else 0.0


def kind_of(name: str) -> str:
    """The kind of a layer's tensor: attn_q, shortconv.conv; empty: it is of no layer."""
    parts = name.split(".")
    if parts[0] != "blk" or len(parts) < 3:
        return ""
    return parts[2] if len(parts) == 3 else ".".join(parts[2:-1])


def is_draft(header: GgufHeader, name: str) -> bool:
    """True for a tensor of the layers that draft, which follow the last one. Raises BadGguf."""
    prefix, parts = architecture_of(header).name, name.split(".")
    count: int = header.get(f"{prefix}.{DRAFTING}", int, 0)
    if not count or parts[0] != "blk" or not parts[1].isdecimal():
        return False
    last: int = header.require(f"{prefix}.block_count", int)
    return last - count <= int(parts[1]) < last


def num_swapped_heads(header: GgufHeader, tensor: GgufTensor) -> int | None:
    """Number of heads whose rows have to be brought into order; None: they are."""
    architecture = architecture_of(header)
    if not architecture.swaps_rows or not tensor.name.startswith("blk."):
        return None
    _, kind, _ = _split(header, tensor.name)
    if kind not in (QUERIES, KEYS):
        return None
    num_heads: int = header.require(f"{architecture.name}.attention.head_count", int)
    if kind == KEYS:
        num_heads = header.get(f"{architecture.name}.attention.head_count_kv", int, num_heads)
    return num_heads


def _split(header: GgufHeader, name: str) -> tuple[int, str, str]:
    """Layer, kind and end of a tensor's name: 3, attn_q, weight; the end may be empty."""
    parts = name.split(".")
    if len(parts) < 3 or parts[0] != "blk" or not parts[1].isdecimal():
        header.refuse(f"tensor {name} is not supported")
    return int(parts[1]), kind_of(name), "".join(parts[3:][-1:])


def _shaped(kind: str, tensor: GgufTensor) -> GgufTensor:
    """The tensor with the shape of a Hugging Face folder, which may have a dimension of 1 more."""
    if kind in CONVS:
        return replace(tensor, shape=(tensor.shape[0], 1, tensor.shape[1]))
    return replace(tensor, shape=(1, *tensor.shape)) if kind == SHARED_GATE else tensor
