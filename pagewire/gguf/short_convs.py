"""Layers of a short convolution, as LFM2 has them in place of attention."""

from collections.abc import Mapping
from typing import Any

from pagewire.gguf.header import GgufHeader

KV_HEADS, WIDTH = "attention.head_count_kv", "shortconv.l_cache"
KEYS = frozenset({WIDTH})
CONV, FULL = "conv", "full_attention"
MOST_WIDTH = 1 << 16
INTEGERS = "bBhHiIqQ"  # types of an array


def sizes(header: GgufHeader, prefix: str, num_layers: int) -> dict[str, Any]:
    """The kind of each layer, of which those without KV heads do not attend. Raises BadGguf."""
    key = f"{prefix}.{KV_HEADS}"
    counts: memoryview = header.require(key, memoryview)
    heads = {count for count in counts if count} if counts.format in INTEGERS else set()
    if len(counts) != num_layers or len(heads) != 1 or not 0 < (count := heads.pop()) < 1 << 16:
        header.refuse(f"{key}: {list(counts[:8])}... are no heads of {num_layers} layers")
    width: int = header.require(f"{prefix}.{WIDTH}", int)
    if not 0 < width < MOST_WIDTH:
        header.refuse(f"{prefix}.{WIDTH}: {width} is outside [1, {MOST_WIDTH})")
    return {
        "num_key_value_heads": count,
        "layer_types": [FULL if each else CONV for each in counts],
        "conv_L_cache": width,
    }


def config(common: Mapping[str, Any]) -> dict[str, Any]:
    """The content of config.json, of what all decoders have in theirs."""
    not_here = ("rms_norm_eps", "hidden_act")
    content = {name: value for name, value in common.items() if name not in not_here}
    return {**content, "norm_eps": common["rms_norm_eps"]}


def shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shapes of a convolution's tensors, by the ends of their names."""
    hidden = config["hidden_size"]
    return {
        "shortconv.in_proj.weight": (3 * hidden, hidden),
        "shortconv.conv.weight": (hidden, config["conv_L_cache"]),
        "shortconv.out_proj.weight": (hidden, hidden),
    }
