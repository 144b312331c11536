"""The decoders that are read out of GGUF files: names, shapes and forms of their tensors."""

from collections.abc import Mapping
from dataclasses import dataclass, field
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
QUERIES, KEYS = "attn_q", "attn_k"
QUERY_BIAS = "blk.0.attn_q.bias"


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

    @property
    def layer_names(self) -> Mapping[str, str]:
        """The tensors of a layer, here and in a Hugging Face folder, without `.weight`."""
        more = QK_NORMS if self.has_qk_norms else {}
        return LAYER | more | (NORMS_ON_BOTH_SIDES if self.norms_both_sides else {})


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


def architecture_of(header: GgufHeader) -> GgufArchitecture:
    """The model's family. Raises BadGguf for one that is not read here."""
    name = header.require(ARCHITECTURE, str)
    if name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        header.refuse(f"{ARCHITECTURE}: {name!r} is not supported; supported are {known}")
    return ARCHITECTURES[name]


def weights(header: GgufHeader) -> dict[str, GgufTensor]:
    """The file's tensors by their names in a Hugging Face folder. Raises BadGguf."""
    names = architecture_of(header).layer_names
    found: dict[str, GgufTensor] = {}
    for name, tensor in header.tensors.items():
        if name in OUTER:
            found[OUTER[name]] = tensor
        elif name != ROPE_FACTORS:
            layer, kind, end = _split(header, name)
            if kind not in names:
                header.refuse(f"tensor {name} is not supported")
            found[f"model.layers.{layer}.{names[kind]}.{end}"] = tensor
    return found


def added(header: GgufHeader, tensor: GgufTensor) -> float:
    """The number that is added to those of a tensor, which gives a Hugging Face folder's."""
    is_norm = tensor.name.endswith("norm.weight")
    return -1.0 if is_norm and architecture_of(header).adds_one_to_norms else 0.0


def num_swapped_heads(header: GgufHeader, tensor: GgufTensor) -> int | None:
    """Of how many heads the rows have to be brought into order; None: they are."""
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


def check_tensors(header: GgufHeader, config: Mapping[str, Any]) -> None:
    """Raises BadGguf for a tensor that is missing, too many or of another shape.

    Called before memory is taken for what the configuration says.
    """
    architecture = architecture_of(header)
    num_layers = config["num_hidden_layers"]
    if num_layers > len(header.tensors):
        header.refuse(f"{num_layers} layers, and {len(header.tensors)} tensors in all")
    shapes = {name: shape for name, shape in _outer_shapes(config).items() if name != HEAD}
    for layer in range(num_layers):
        for kind, shape in _layer_shapes(architecture, config).items():
            shapes[f"blk.{layer}.{kind}.weight"] = shape
    missing = shapes.keys() - header.tensors.keys()
    if missing:
        header.refuse(f"{len(missing)} tensors are missing, {min(missing)} first")
    shapes |= _outer_shapes(config)
    for name, tensor in header.tensors.items():
        if name == ROPE_FACTORS:
            continue
        if name not in shapes and not _is_bias(header, tensor, shapes):
            header.refuse(f"tensor {name} is not supported with {num_layers} layers")
        if name in shapes and tensor.shape != shapes[name]:
            header.refuse(f"tensor {name} has shape {tensor.shape}, expected {shapes[name]}")


def _split(header: GgufHeader, name: str) -> tuple[int, str, str]:
    """Layer, kind and end of a tensor's name: 3, attn_q, weight."""
    parts = name.split(".")
    if len(parts) != 4 or parts[0] != "blk" or not parts[1].isdecimal():
        header.refuse(f"tensor {name} is not supported")
    return int(parts[1]), parts[2], parts[3]


def _is_bias(header: GgufHeader, tensor: GgufTensor, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    weight = tensor.name.removesuffix(".bias") + ".weight"
    if not tensor.name.endswith(".bias") or len(shapes.get(weight, ())) != 2:
        return False
    if tensor.shape != shapes[weight][:1]:
        header.refuse(
            f"tensor {tensor.name} has shape {tensor.shape}, expected {shapes[weight][:1]}"
        )
    return True


def _outer_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    table = config["vocab_size"], config["hidden_size"]
    return {EMBEDDING: table, "output_norm.weight": table[1:], HEAD: table}


def _layer_shapes(
    architecture: GgufArchitecture, config: Mapping[str, Any]
) -> dict[str, tuple[int, ...]]:
    hidden, inner, head_dim = (
        config[name] for name in ("hidden_size", "intermediate_size", "head_dim")
    )
    q, kv = (config[name] * head_dim for name in ("num_attention_heads", "num_key_value_heads"))
    norms = dict.fromkeys(QK_NORMS, (head_dim,)) if architecture.has_qk_norms else {}
    if architecture.norms_both_sides:
        norms |= dict.fromkeys(NORMS_ON_BOTH_SIDES, (hidden,))
    return {
        "attn_norm": (hidden,),
        "attn_q": (q, hidden),
        "attn_k": (kv, hidden),
        "attn_v": (kv, hidden),
        "attn_output": (hidden, q),
        "ffn_norm": (hidden,),
        "ffn_gate": (inner, hidden),
        "ffn_up": (inner, hidden),
        "ffn_down": (hidden, inner),
        **norms,
    }
