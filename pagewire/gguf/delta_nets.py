"""Layers of a gated delta net, as Qwen3.5 has them: their sizes, and the order of their heads.

A file has value heads in turn over key heads, where a Hugging Face folder has those of one key head
together; it has minus the exponentials of what the folder calls A_log.
"""

from collections.abc import Mapping
from typing import Any

from pagewire.gguf.architecture import DELTA_NET, GgufArchitecture, architecture_of, kind_of
from pagewire.gguf.head_tiles import HeadTiles
from pagewire.gguf.header import GgufHeader, GgufTensor

NUMBERS = {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
}
INNER, INTERVAL = "ssm.inner_size", "full_attention_interval"
SECTIONS = "rope.dimension_sections"  # of rotations by three positions, which texts have equal
KEYS = frozenset({*NUMBERS, INNER, INTERVAL, SECTIONS})
NOT_HERE = ("rope_theta", "rope_scaling", "partial_rotary_factor")
LINEAR, FULL = "linear_attention", "full_attention"
QKV, GATE, CONV, OUT = "attn_qkv", "attn_gate", "ssm_conv1d", "ssm_out"
OF_HEADS = ("ssm_alpha", "ssm_beta", "ssm_a", "ssm_dt")  # with a row or number for each value head
DECAY = "ssm_a"


def layer_types(interval: int, num_layers: int) -> list[str]:
    """The kind of each layer, of which the last of each so many attends."""
    return [LINEAR if (index + 1) % interval else FULL for index in range(num_layers)]


def config(header: GgufHeader, common: Mapping[str, Any], part: float) -> dict[str, Any]:
    """The content of config.json, of what all decoders have in theirs.

    This part of each head is rotated.
    """
    rotation = {
        **(common["rope_scaling"] or {"rope_type": "default"}),
        "rope_theta": common["rope_theta"],
        "partial_rotary_factor": part,
    }
    sections = header.get(f"{architecture_of(header).name}.{SECTIONS}", memoryview)
    if sections is not None:
        rotation |= {"mrope_section": [each for each in sections if each]}
    content = {key: value for key, value in common.items() if key not in NOT_HERE}
    return {**content, "rope_parameters": rotation}


def shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shapes of a delta net's tensors, by the ends of their names."""
    hidden, heads = config["hidden_size"], config["linear_num_value_heads"]
    inner = heads * config["linear_value_head_dim"]
    channels = _num_queries_and_keys(config) + inner
    return {
        f"{QKV}.weight": (channels, hidden),
        f"{GATE}.weight": (inner, hidden),
        "ssm_alpha.weight": (heads, hidden),
        "ssm_beta.weight": (heads, hidden),
        f"{CONV}.weight": (channels, config["linear_conv_kernel_dim"]),
        "ssm_norm.weight": (config["linear_value_head_dim"],),
        f"{OUT}.weight": (hidden, inner),
        DECAY: (heads,),
        "ssm_dt.bias": (heads,),
    }


def tiles(header: GgufHeader, tensor: GgufTensor) -> HeadTiles | None:
    """The value heads of a tensor that are in turn over key heads; None: it has none."""
    architecture, kind = architecture_of(header), kind_of(tensor.name)
    if not architecture.has_delta_nets or kind not in DELTA_NET:
        return None
    config = _numbers(header, architecture)
    num_keys, num_values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    size = header.require(f"{architecture.name}.{INNER}", int) // num_values
    per_key = num_values // num_keys
    begin = _num_queries_and_keys(config) if kind in (QKV, CONV) else 0
    if kind in OF_HEADS:
        return HeadTiles(num_keys, per_key, 1)
    if kind in (QKV, GATE, CONV, OUT):
        return HeadTiles(num_keys, per_key, size, begin, of_columns=kind == OUT)
    return None


def is_decay(header: GgufHeader, tensor: GgufTensor) -> bool:
    """True for a tensor of which a Hugging Face folder has the logarithms."""
    return architecture_of(header).has_delta_nets and kind_of(tensor.name) == DECAY


def _numbers(header: GgufHeader, architecture: GgufArchitecture) -> dict[str, int]:
    return {
        name: header.require(f"{architecture.name}.{key}", int) for key, name in NUMBERS.items()
    }


def _num_queries_and_keys(config: Mapping[str, Any]) -> int:
    return 2 * int(config["linear_num_key_heads"]) * int(config["linear_key_head_dim"])
