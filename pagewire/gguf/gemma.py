"""Members of a Gemma's config.json that other decoders lack: windows, rotations and scale.

GGUF holds the text model alone. Most of what is here no file says: it is the architecture's.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pagewire.gguf.architecture import ROPE_FACTORS
from pagewire.gguf.header import GgufHeader, shortest

WINDOW_PATTERN, WINDOW_THETA = "attention.sliding_window_pattern", "rope.freq_base_swa"
SOFTCAPS = ("attn_logit_softcapping", "final_logit_softcapping")
WINDOW, ALL = "sliding_attention", "full_attention"
ACTIVATION = "gelu_pytorch_tanh"
IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
NOT_HERE = ("rope_theta", "rope_scaling", "hidden_act")


@dataclass(frozen=True, slots=True)
class Generation:
    """A Gemma whose layers may attend to a window, and what holds where its file says nothing."""

    keys: frozenset[str]  # that it reads, besides those of all decoders
    period: int  # of layers, the last of which attends to all tokens
    window: int | None  # in tokens; None: no layer has one
    softcaps: tuple[float | None, float | None]
    widest: int  # layers of the model whose scores are divided by another number than others'
    has_two_rotations: bool  # layers with a window rotate by their own base


GENERATIONS = {
    "gemma2": Generation(frozenset(SOFTCAPS), 2, 4096, (50.0, 30.0), 46, has_two_rotations=False),
    "gemma3": Generation(
        frozenset({WINDOW_PATTERN, WINDOW_THETA, *SOFTCAPS}),
        6,
        None,
        (None, None),
        62,
        has_two_rotations=True,
    ),
}
NAMES = frozenset({"gemma", *GENERATIONS})


def keys(name: str) -> frozenset[str]:
    """The keys of an architecture that only these read."""
    return GENERATIONS[name].keys if name in GENERATIONS else frozenset()


def config(header: GgufHeader, name: str, common: Mapping[str, Any]) -> dict[str, Any]:
    """The content of config.json, of what all decoders have in theirs. Raises BadGguf."""
    whole = common["rope_scaling"] or {"rope_type": "default"}
    if "partial_rotary_factor" in common:
        header.refuse(f"{name}.rope.dimension_count: a part of each head is not rotated alone")
    if "factors" in whole:
        header.refuse(f"tensor {ROPE_FACTORS} is not supported with {name}")
    content = {
        **dict.fromkeys(IDS),  # or the class has its own
        **{key: value for key, value in common.items() if key not in NOT_HERE},
    }
    rotation = {**whole, "rope_theta": common["rope_theta"]}
    if name in GENERATIONS:
        return content | _of_generation(header, name, common, rotation)
    if "sliding_window" in common:
        header.refuse(f"{name}.attention.sliding_window is not supported")
    return content | {"hidden_act": ACTIVATION, "rope_parameters": rotation}


def _of_generation(
    header: GgufHeader, name: str, common: Mapping[str, Any], rotation: Mapping[str, Any]
) -> dict[str, Any]:
    generation = GENERATIONS[name]
    window = common.get("sliding_window", generation.window)
    if generation.has_two_rotations:
        header.require(f"{name}.rope.freq_base", float)
        theta = shortest(header.get(f"{name}.{WINDOW_THETA}", float, 10_000.0))
        # Windows are short: what stretches long contexts is for the other layers alone.
        rotation = {WINDOW: {"rope_type": "default", "rope_theta": theta}, ALL: rotation}
    caps = {
        key: _softcap(header, f"{name}.{key}", usual)
        for key, usual in zip(SOFTCAPS, generation.softcaps, strict=True)
    }
    return {
        "hidden_activation": ACTIVATION,
        "query_pre_attn_scalar": _scale(generation, common),
        "sliding_window": window,
        "layer_types": _layer_types(header, name, common["num_hidden_layers"], window),
        "rope_parameters": rotation,
        **caps,
    }


def _scale(generation: Generation, common: Mapping[str, Any]) -> int:
    """The number by whose root scores are divided: a head's size, or the width per head."""
    if common["num_hidden_layers"] == generation.widest:
        return int(common["hidden_size"] // common["num_attention_heads"])
    return int(common["head_dim"])


def _layer_types(header: GgufHeader, name: str, num_layers: int, window: int | None) -> list[str]:
    key, pattern = f"{name}.{WINDOW_PATTERN}", GENERATIONS[name].period
    if WINDOW_PATTERN in GENERATIONS[name].keys:
        pattern = header.get(key, (int, memoryview), pattern)
    if window is None:
        return [ALL] * num_layers
    if isinstance(pattern, memoryview):
        if pattern.format != "?" or len(pattern) != num_layers:
            found = f"{len(pattern)} entries of type {pattern.format}"
            header.refuse(f"{key}: {found} for {num_layers} layers, expected bool")
        return [WINDOW if is_window else ALL for is_window in pattern]
    if pattern < 1:
        header.refuse(f"{key}: {pattern} is below 1")
    return [WINDOW if (layer + 1) % pattern else ALL for layer in range(num_layers)]


def _softcap(header: GgufHeader, key: str, usual: float | None) -> float | None:
    value: float | None = header.get(key, float, usual)
    return None if value is None else shortest(value)
