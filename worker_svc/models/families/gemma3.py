"""Gemma 3: five of six layers have a window and a rotation of their own; QK norms.

The text of the models with pictures is this decoder, too.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from worker_svc.models.config_file import ConfigJson
from worker_svc.models.config_keys import FULL_ATTENTION
from worker_svc.models.config_rope import rotary
from worker_svc.models.families import gemma
from worker_svc.models.families.dense import SLIDING
from worker_svc.models.families.family import Family
from worker_svc.models.rope import RotaryConfig
from worker_svc.models.spec import ModelSpec, UnsupportedModel

WITH_PICTURES = "Gemma3ForConditionalGeneration"
OTHER_PARTS = r"(model\.)?(vision_tower|multi_modal_projector)\..*"
PERIOD, THETA, NEAR_THETA = 6, 1_000_000.0, 10_000.0
# Of the configuration class; published files leave most of them out.
DEFAULTS: dict[str, Any] = {
    "head_dim": 256,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "max_position_embeddings": 131_072,
    "num_attention_heads": 8,
    "num_hidden_layers": 26,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-6,
    "sliding_window": 4096,
    "vocab_size": 262_208,
}


def read(config: ConfigJson) -> ModelSpec:
    config = gemma.with_defaults(config, DEFAULTS)
    spec = gemma.decoder(
        config, period=config.positive("sliding_window_pattern", PERIOD), qk_norm=True
    )
    spec = replace(spec, ropes=_rotations(config, spec.attentions[0].head_dim))
    if config.architecture != WITH_PICTURES:
        return spec
    names, newer = spec.names.under("language_model"), spec.names.of_text
    return replace(spec, names=names, other_names=(newer,), other_parts=OTHER_PARTS)


def _rotations(config: ConfigJson, head_dim: int) -> Mapping[str, RotaryConfig]:
    """The two rotations. Raises UnsupportedModel."""
    by_kind = config.get("rope_parameters") or {}
    if not isinstance(by_kind, dict) or by_kind.keys() - {FULL_ATTENTION, SLIDING}:
        raise UnsupportedModel("rope_parameters: is not by the kind of layer")
    # What stretches long contexts is for the layers that see all.
    whole = replace(
        config, values={**config.values, "rope_parameters": by_kind.get(FULL_ATTENTION)}
    )
    near = {
        "rope_parameters": by_kind.get(SLIDING),
        "rope_theta": config.get("rope_local_base_freq"),
        "max_position_embeddings": config.get("max_position_embeddings"),
    }
    return {
        gemma.WHOLE: rotary(whole, head_dim, THETA),
        gemma.NEAR: rotary(replace(config, values=near), head_dim, NEAR_THETA),
    }


FAMILY = Family(
    "Gemma3ForCausalLM",
    "gemma3_text",
    read,
    keys=gemma.KEYS | {"rope_local_base_freq", "sliding_window_pattern"},
    neutral=gemma.NEUTRAL,
    # The period, which `layer_types` repeats, and what is about pictures alone.
    inert=gemma.INERT
    | {"_sliding_window_pattern", "boi_token_index", "eoi_token_index", "image_token_index"}
    | {"mm_tokens_per_image", "vision_config"},
    wrappers=frozenset({WITH_PICTURES}),
)
