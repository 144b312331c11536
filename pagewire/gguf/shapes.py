"""The tensors that a GGUF file must hold, and their shapes: checked before memory is taken."""

from collections.abc import Mapping
from typing import Any

from pagewire.gguf import delta_nets, short_convs
from pagewire.gguf.architecture import (
    EMBEDDING,
    HEAD,
    LAYER,
    MLP,
    NORMS_ON_BOTH_SIDES,
    QK_NORMS,
    ROPE_FACTORS,
    ROUTER,
    SHARED,
    SINKS,
    GgufArchitecture,
    architecture_of,
    is_draft,
)
from pagewire.gguf.delta_nets import FULL
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
    outer = _outer_shapes(architecture, config)
    shapes = {name: shape for name, shape in outer.items() if name != HEAD}
    for layer in range(num_layers):
        for name, shape in _layer_shapes(architecture, config, layer).items():
            shapes[f"blk.{layer}.{name}"] = shape
    missing = shapes.keys() - header.tensors.keys()
    if missing:
        header.refuse(f"{len(missing)} tensors are missing, {min(missing)} first")
    shapes |= outer
    for name, tensor in header.tensors.items():
        if name == ROPE_FACTORS or is_draft(header, name):
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


def _outer_shapes(architecture: GgufArchitecture, config: Mapping[str, Any]) -> dict[str, Shape]:
    table = config["vocab_size"], config["hidden_size"]
    tables = (EMBEDDING, HEAD)
    return {name: table if name in tables else table[1:] for name in architecture.outer_names}


def _layer_shapes(
    architecture: GgufArchitecture, config: Mapping[str, Any], layer: int
) -> dict[str, Shape]:
    """The shapes of a layer's tensors, by their names without its own."""
    hidden = config["hidden_size"]
    weights: dict[str, Shape] = {"attn_norm": (hidden,), architecture.feed_norm: (hidden,)}
    if architecture.norms_both_sides:
        weights |= dict.fromkeys(NORMS_ON_BOTH_SIDES, (hidden,))
    has_attention = config.get("layer_types", {layer: FULL})[layer] == FULL
    weights |= _attention_shapes(architecture, config) if has_attention else {}
    weights |= _feed_shapes(architecture, config)
    found = {f"{kind}.weight": shape for kind, shape in weights.items()}
    if architecture.has_biases:
        matrices = {kind: shape for kind, shape in weights.items() if len(shape) > 1}
        found |= {f"{kind}.bias": shape[:-1] for kind, shape in matrices.items()}
    if has_attention:
        return found
    if architecture.has_delta_nets:
        return found | delta_nets.shapes(config)
    return found | short_convs.shapes(config)


def _attention_shapes(
    architecture: GgufArchitecture, config: Mapping[str, Any]
) -> dict[str, Shape]:
    hidden, head_dim, num_heads = (
        config[name] for name in ("hidden_size", "head_dim", "num_attention_heads")
    )
    q, kv = num_heads * head_dim, config["num_key_value_heads"] * head_dim
    found: dict[str, Shape] = {
        "attn_q": (2 * q if architecture.gates_attention else q, hidden),
        "attn_k": (kv, hidden),
        "attn_v": (kv, hidden),
        "attn_output": (hidden, q),
    }
    found |= dict.fromkeys(QK_NORMS, (head_dim,)) if architecture.has_qk_norms else {}
    return found | ({SINKS: (num_heads,)} if architecture.has_sinks else {})


def _feed_shapes(architecture: GgufArchitecture, config: Mapping[str, Any]) -> dict[str, Shape]:
    """The shapes of an MLP's tensors, or of a router's and those of all experts."""
    hidden, experts = config["hidden_size"], architecture.experts
    if experts is None:
        return dict(zip(MLP, _mlp(config["intermediate_size"], hidden), strict=True))
    count = config[experts.count]
    of_each = _mlp(config[experts.size], hidden)
    found = {kind: (count, *each) for kind, each in zip(experts.parts, of_each, strict=True)}
    if experts.has_shared:
        size = config["shared_expert_intermediate_size"]
        found |= dict(zip(SHARED, ((hidden,), *_mlp(size, hidden)), strict=True))
    return {ROUTER: (count, hidden), **found}


def _mlp(inner: int, hidden: int) -> tuple[Shape, Shape, Shape]:
    """The shapes of gate, up and down."""
    return (inner, hidden), (inner, hidden), (hidden, inner)
