"""MiniMax-M2: one norm of all heads' queries and one of all keys; experts chosen by sigmoids."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from worker_svc.models.config_file import ConfigJson
from worker_svc.models.families import dense, experts, mixtral
from worker_svc.models.families.family import Family
from worker_svc.models.spec import ModelSpec, MoeSpec, RouterSpec, UnsupportedModel

# Where config.json has none:
EXPERTS, EXPERTS_PER_TOKEN, HEAD_DIM, THETA = 256, 8, 128, 5_000_000.0
LAYER_KINDS, TURNING = "attn_type_list", "rotary_dim"
NAMES = replace(
    mixtral.NAMES,
    router_bias="e_score_correction_bias",
    divided={**mixtral.NAMES.divided, "q_norm.weight": 0, "k_norm.weight": 0},
)
# Keys of the published files, of the class that they bring, which computes the same.
PUBLISHED = {
    "AutoConfig": "configuration_minimax_m2.MiniMaxM2Config",
    "AutoModelForCausalLM": "modeling_minimax_m2.MiniMaxM2ForCausalLM",
}
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "auto_map": ({}, PUBLISHED),
    "layernorm_full_attention_beta": (1,),
    "layernorm_linear_attention_beta": (1,),
    "layernorm_mlp_beta": (1,),
    "qk_norm_type": ("per_layer",),
    "scoring_func": ("sigmoid",),
    "shared_intermediate_size": (0,),
    "use_qk_norm": (True,),
    "use_routing_bias": (True,),
}
INERT = frozenset(
    {
        "mlp_intermediate_size",
        "mtp_transformer_layers",
        "num_mtp_modules",
        "shared_moe_mode",
        "use_mtp",
    }
)


def read(config: ConfigJson) -> ModelSpec:
    if config.get("head_dim") is None:
        config = replace(config, values={**config.values, "head_dim": HEAD_DIM})
    kinds = config.get(LAYER_KINDS)
    if kinds is not None and kinds != [1] * config.positive("num_hidden_layers"):
        raise UnsupportedModel(f"{LAYER_KINDS}: only 1 for each layer, full attention, is served")
    spec = dense.decoder(config, qk_norm=True, default_theta=THETA, default_part=_part(config))
    router = RouterSpec(
        *experts.counts(config, EXPERTS, EXPERTS_PER_TOKEN),
        renormalizes=True,
        is_sigmoid=True,
        has_bias=True,
    )
    feed = MoeSpec(router, config.positive("intermediate_size"))
    layers = (
        replace(layer, mixer=replace(layer.attention, norms_all_heads=True), feed=feed)
        for layer in spec.layers
    )
    return replace(spec, layers=tuple(layers), names=NAMES)


def _part(config: ConfigJson) -> float:
    """The part of a head that is rotated, where no other key says it. Raises UnsupportedModel."""
    head_dim = config.positive("head_dim")
    turning = config.positive(TURNING, head_dim)
    if turning > head_dim:
        raise UnsupportedModel(f"{TURNING}: {turning} of {head_dim} dimensions")
    return turning / head_dim


FAMILY = Family(
    "MiniMaxM2ForCausalLM",
    "minimax_m2",
    read,
    keys=experts.KEYS | {LAYER_KINDS, TURNING},
    neutral=NEUTRAL,
    inert=INERT,
)
