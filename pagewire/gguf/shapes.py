"""The tensors that a GGUF file must hold, and their shapes: checked before memory is taken."""

from collections.abc import Mapping
from typing import Any

from pagewire.gguf.architecture import (
    EMBEDDING,
    EXPERT_DOWN,
    EXPERT_GATE,
    EXPERT_UP,
    HEAD,
    LAYER,
    NORMS_ON_BOTH_SIDES,
    QK_NORMS,
    ROPE_FACTORS,
    ROUTER,
    SINKS,
    GgufArchitecture,
    architecture_of,
)
from pagewire.gguf.header import GgufHeader, GgufTensor

Shape = tuple[int, ...]


def check_tensors(header: GgufHeader, config: Mapping[str, Any]) -> None:
    """Raises BadGguf for a tensor that is missing, too many or of another shape.

    Called before memory is taken for what the configuration says.
    """
    architecture = architecture_of(header)
    num_layers = config["num_hidden_layers"]
    if num_layers > len(header.tensors):
        header.refuse(f"{num_layers} layers, and {len(header.tensors)} tensors in all")
    shapes = {name: shape for name, shape in _outer_shapes(config).items() if name != HEAD}
    of_layer = _layer_shapes(architecture, config)
    for layer in range(num_layers):
        for kind, shape in of_layer.items():
            shapes[f"blk.{layer}.{kind}.weight"] = shape
            if architecture.has_biases and len(shape) > 1:
                shapes[f"blk.{layer}.{kind}.bias"] = shape[:-1]
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


def _is_bias(header: GgufHeader, tensor: GgufTensor, shapes: Mapping[str, Shape]) -> bool:
    """True for the bias of a matrix that may have one. Raises BadGguf for another shape."""
    whole = tensor.name.removesuffix(".bias")
    weight = f"{whole}.weight"
    is_matrix = whole.rpartition(".")[2] in LAYER and len(shapes.get(weight, ())) == 2
    if not tensor.name.endswith(".bias") or not is_matrix:
        return False
    if tensor.shape != shapes[weight][:1]:
        header.refuse(
            f"tensor {tensor.name} has shape {tensor.shape}, expected {shapes[weight][:1]}"
        )
    return True


def _outer_shapes(config: Mapping[str, Any]) -> dict[str, Shape]:
    table = config["vocab_size"], config["hidden_size"]
    return {EMBEDDING: table, "output_norm.weight": table[1:], HEAD: table}


def _layer_shapes(architecture: GgufArchitecture, config: Mapping[str, Any]) -> dict[str, Shape]:
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    q, kv = (config[name] * head_dim for name in ("num_attention_heads", "num_key_value_heads"))
    norms = dict.fromkeys(QK_NORMS, (head_dim,)) if architecture.has_qk_norms else {}
    if architecture.norms_both_sides:
        norms |= dict.fromkeys(NORMS_ON_BOTH_SIDES, (hidden,))
    if architecture.has_sinks:
        norms |= {SINKS: (config["num_attention_heads"],)}
    return {
        "attn_norm": (hidden,),
        "attn_q": (q, hidden),
        "attn_k": (kv, hidden),
        "attn_v": (kv, hidden),
        "attn_output": (hidden, q),
        architecture.feed_norm: (hidden,),
        **norms,
        **_feed_shapes(architecture, config),
    }


def _feed_shapes(architecture: GgufArchitecture, config: Mapping[str, Any]) -> dict[str, Shape]:
    """The shapes of an MLP's tensors, or of a router's and those of all experts."""
    hidden, experts = config["hidden_size"], architecture.experts
    if experts is None:
        inner = config["intermediate_size"]
        return {
            "ffn_gate": (inner, hidden),
            "ffn_up": (inner, hidden),
            "ffn_down": (hidden, inner),
        }
    count, inner = config[experts.count], config[experts.size]
    return {
        ROUTER: (count, hidden),
        EXPERT_GATE: (count, inner, hidden),
        EXPERT_UP: (count, inner, hidden),
        EXPERT_DOWN: (count, hidden, inner),
    }
