"""The decoder that DeepSeek V3 and GLM-4.7-Flash share: attention over latents."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from worker_svc.models.config_file import ConfigJson
from worker_svc.models.config_keys import FULL_ATTENTION
from worker_svc.models.config_rope import rotary
from worker_svc.models.families import dense, experts
from worker_svc.models.rope import latent_factor
from worker_svc.models.spec import (
    AttentionSpec,
    LatentSpec,
    LayerSpec,
    MlpSpec,
    ModelSpec,
    TensorNames,
    UnsupportedModel,
)

DRAFTING = "num_nextn_predict_layers"
KEYS = experts.ROUTED_KEYS | {
    DRAFTING,
    "attention_bias",
    "kv_lora_rank",
    "q_lora_rank",
    "qk_head_dim",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "rope_interleave",
    "v_head_dim",
}
# Keys of published files, under the values that say what is computed anyway.
PUBLISHED = {
    "AutoConfig": "configuration_deepseek.DeepseekV3Config",
    "AutoModel": "modeling_deepseek.DeepseekV3Model",
    "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
}
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "auto_map": ({}, PUBLISHED),
    "moe_layer_freq": (1,),
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
}
INERT = frozenset({"aux_loss_alpha", "ep_size", "pretraining_tp", "seq_aux"})
NAMES = TensorNames(shared_expert="shared_experts")


def decoder(config: ConfigJson, routed: experts.RoutedDefaults) -> ModelSpec:
    """A model with experts in all layers but the first ones. Raises UnsupportedModel."""
    dense.refuse_activations(config)
    dense.refuse_layer_types(config, (FULL_ATTENTION,))
    rope_dim, nope_dim = config.positive("qk_rope_head_dim"), config.positive("qk_nope_head_dim")
    _check_heads(config, rope_dim, nope_dim)
    rope = rotary(config, rope_dim)
    size, has_bias = config.positive("kv_lora_rank"), config.flag("attention_bias")
    attention = AttentionSpec(
        config.positive("num_attention_heads"),
        num_kv_heads=1,
        head_dim=size + rope_dim,
        rope=dense.ROPE,
        qkv_bias=has_bias,
        o_bias=has_bias,
        scale=(nope_dim + rope_dim) ** -0.5 * latent_factor(rope.scaling),
        latent=LatentSpec(
            size,
            rope_dim,
            nope_dim,
            config.positive("v_head_dim"),
            None if config.get("q_lora_rank") is None else config.positive("q_lora_rank"),
            is_interleaved=config.flag("rope_interleave", default=True),
        ),
    )
    layer = LayerSpec(attention, MlpSpec(config.positive("intermediate_size")))
    spec = ModelSpec(
        architecture=config.architecture,
        vocab_size=config.positive("vocab_size"),
        hidden_size=config.positive("hidden_size"),
        layers=(layer,) * config.positive("num_hidden_layers"),
        ropes={dense.ROPE: rope},
        rms_norm_eps=float(config.required("rms_norm_eps")),
        max_position_embeddings=config.positive("max_position_embeddings"),
        tie_word_embeddings=config.flag("tie_word_embeddings"),
        names=NAMES,
    )
    drafting = experts.drafting_layers(spec, config.count(DRAFTING, 1))
    return replace(experts.routed(config, spec, routed), other_parts=drafting)


def _check_heads(config: ConfigJson, rope_dim: int, nope_dim: int) -> None:
    """Raises UnsupportedModel for sizes of heads that contradict each other."""
    num_heads = config.positive("num_attention_heads")
    for name, size in (
        ("num_key_value_heads", num_heads),
        ("head_dim", rope_dim),
        ("qk_head_dim", nope_dim + rope_dim),
    ):
        if config.positive(name, size) != size:
            raise UnsupportedModel(f"{name}: {config.get(name)!r} is not supported, only {size} is")
    if rope_dim % 2:
        raise UnsupportedModel(f"qk_rope_head_dim: {rope_dim} is odd, and rotation takes pairs")
