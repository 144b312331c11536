"""What config.json of a Gemma 3 says beyond that of other decoders: windows, rotations and scale.

GGUF holds the text model alone. Most of what is here no file says: it is the architecture's.
"""

from collections.abc import Mapping
from typing import Any

from pagewire.gguf.architecture import ROPE_FACTORS
from pagewire.gguf.header import GgufHeader, shortest

NAME = "gemma3"
WINDOW_PATTERN, WINDOW_THETA = "attention.sliding_window_pattern", "rope.freq_base_swa"
SOFTCAPS = ("attn_logit_softcapping", "final_logit_softcapping")
KEYS = frozenset({WINDOW_PATTERN, WINDOW_THETA, *SOFTCAPS})

WINDOW, ALL = "sliding_attention", "full_attention"
PERIOD = 6  # of layers, the last of which attends to all tokens
LAYERS_OF_27B = 62
IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
NOT_HERE = ("rope_theta", "rope_scaling", "hidden_act")


def config(header: GgufHeader, common: Mapping[str, Any]) -> dict[str, Any]:
    """The content of config.json, of what all decoders have in theirs. Raises BadGguf."""
    header.require(f"{NAME}.rope.freq_base", float)
    theta = shortest(header.get(f"{NAME}.{WINDOW_THETA}", float, 10_000.0))
    whole = common["rope_scaling"] or {"rope_type": "default"}
    if "partial_rotary_factor" in common:
        header.refuse(f"{NAME}.rope.dimension_count: a part of each head is not rotated alone")
    if "factors" in whole:
        header.refuse(f"tensor {ROPE_FACTORS} is not supported with {NAME}")
    return {
        **dict.fromkeys(IDS),  # or the class has its own
        **{name: value for name, value in common.items() if name not in NOT_HERE},
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": _scale(common),
        "sliding_window": common.get("sliding_window"),
        "layer_types": _layer_types(header, common),
        # Windows are short: what stretches long contexts is for the other layers alone.
        "rope_parameters": {
            WINDOW: {"rope_type": "default", "rope_theta": theta},
            ALL: {**whole, "rope_theta": common["rope_theta"]},
        },
        **{name: _softcap(header, name) for name in SOFTCAPS},
    }


def _scale(common: Mapping[str, Any]) -> int:
    """The number by whose root scores are divided: a head's size, and the width a head in 27B."""
    if common["num_hidden_layers"] == LAYERS_OF_27B:
        return int(common["hidden_size"] // common["num_attention_heads"])
    return int(common["head_dim"])


def _layer_types(header: GgufHeader, common: Mapping[str, Any]) -> list[str]:
    key, num_layers = f"{NAME}.{WINDOW_PATTERN}", common["num_hidden_layers"]
    pattern = header.get(key, (int, memoryview), PERIOD)
    if common.get("sliding_window") is None:
        return [ALL] * num_layers
    if isinstance(pattern, memoryview):
        if pattern.format != "?" or len(pattern) != num_layers:
            found = f"{len(pattern)} entries of type {pattern.format}"
            header.refuse(f"{key}: {found} for {num_layers} layers, expected bool")
        return [WINDOW if is_window else ALL for is_window in pattern]
    if pattern < 1:
        header.refuse(f"{key}: {pattern} is below 1")
    return [WINDOW if (layer + 1) % pattern else ALL for layer in range(num_layers)]


def _softcap(header: GgufHeader, name: str) -> float | None:
    value: float | None = header.get(f"{NAME}.{name}", float)
    return None if value is None else shortest(value)
