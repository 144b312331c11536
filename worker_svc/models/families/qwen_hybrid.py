"""The decoder that Qwen3-Next and Qwen3.5 share: three gated delta nets to each attention.

Attention is gated, norms QK and rotates a part of each head. Weights of norms are stored less 1.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from worker_svc.models.config_file import ConfigJson
from worker_svc.models.config_keys import FULL_ATTENTION
from worker_svc.models.config_rope import rotary
from worker_svc.models.families import dense
from worker_svc.models.spec import (
    AttentionSpec,
    DeltaNetSpec,
    LayerSpec,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    UnsupportedModel,
)

LINEAR_ATTENTION = "linear_attention"
INTERVAL = "full_attention_interval"
KEYS = frozenset(
    {
        INTERVAL,
        "linear_conv_kernel_dim",
        "linear_key_head_dim",
        "linear_num_key_heads",
        "linear_num_value_heads",
        "linear_value_head_dim",
    }
)
# Where config.json says nothing: every fourth layer has attention, a quarter of a head turns.
PERIOD, PART, HEAD_DIM = 4, 0.25, 256
KEY_HEADS, VALUE_HEADS, DELTA_DIM, CONV_WIDTH = 16, 32, 128, 4
# Keys that say what these classes compute anyway, or ask for what is not read.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "attn_output_gate": (True,),
    "mamba_ssm_dtype": ("float32",),
    "output_gate_type": ("swish",),
}
INERT = frozenset(
    {
        "image_token_id",
        "mtp_num_hidden_layers",
        "mtp_use_dedicated_embeddings",
        "video_token_id",
        "vision_config",
        "vision_end_token_id",
        "vision_start_token_id",
    }
)
OTHER_PARTS = r"mtp\..*"  # heads that draft
# Of rotations by three positions of a picture's parts, which are one position for text.
OF_PICTURES = ("mrope_interleaved", "mrope_section")


def decoder(config: ConfigJson, feed: MlpSpec | MoeSpec, *, is_grouped: bool = False) -> ModelSpec:
    """A model with this feed in each layer. Raises UnsupportedModel, naming the key.

    `is_grouped` is `DeltaNetSpec.is_grouped`.
    """
    if config.get("head_dim") is None:
        config = replace(config, values={**config.values, "head_dim": HEAD_DIM})
    kinds = _kinds(config)
    dense.refuse_activations(config)
    num_heads, num_kv_heads, head_dim = config.heads()
    attention = AttentionSpec(
        num_heads, num_kv_heads, head_dim, dense.ROPE, qk_norm=True, is_gated=True
    )
    delta = _delta_net(config, is_grouped=is_grouped)
    return ModelSpec(
        architecture=config.architecture,
        vocab_size=config.positive("vocab_size"),
        hidden_size=config.positive("hidden_size"),
        layers=tuple(
            LayerSpec(delta if kind == LINEAR_ATTENTION else attention, feed) for kind in kinds
        ),
        ropes={dense.ROPE: rotary(config, head_dim, default_part=PART, inert=OF_PICTURES)},
        rms_norm_eps=float(config.required("rms_norm_eps")),
        max_position_embeddings=config.positive("max_position_embeddings"),
        tie_word_embeddings=config.flag("tie_word_embeddings"),
        other_parts=OTHER_PARTS,
        norm_offset=1.0,
    )


def _kinds(config: ConfigJson) -> Sequence[str]:
    """The kind of each layer. Raises UnsupportedModel."""
    num_layers = config.positive("num_hidden_layers")
    kinds = config.get("layer_types")
    if kinds is None:
        period = config.positive(INTERVAL, PERIOD)
        kinds = [
            LINEAR_ATTENTION if (index + 1) % period else FULL_ATTENTION
            for index in range(num_layers)
        ]
    dense.check_types(kinds, (FULL_ATTENTION, LINEAR_ATTENTION), num_layers)
    if FULL_ATTENTION not in kinds:
        raise UnsupportedModel(f"layer_types: no layer is of type {FULL_ATTENTION!r}")
    return list(kinds)


def _delta_net(config: ConfigJson, *, is_grouped: bool) -> DeltaNetSpec:
    num_key_heads = config.positive("linear_num_key_heads", KEY_HEADS)
    num_value_heads = config.positive("linear_num_value_heads", VALUE_HEADS)
    if num_value_heads % num_key_heads:
        raise UnsupportedModel(
            f"linear_num_key_heads: {num_key_heads} does not divide {num_value_heads} value heads"
        )
    return DeltaNetSpec(
        num_key_heads,
        num_value_heads,
        config.positive("linear_key_head_dim", DELTA_DIM),
        config.positive("linear_value_head_dim", DELTA_DIM),
        config.positive("linear_conv_kernel_dim", CONV_WIDTH),
        is_grouped,
    )


def text_of(spec: ModelSpec) -> ModelSpec:
    """The decoder inside a checkpoint of a model with pictures."""
    return replace(spec, names=spec.names.of_text, other_parts=rf"{OTHER_PARTS}|model\.visual\..*")
