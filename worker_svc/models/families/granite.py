"""Granite: Llama's layers with factors on embeddings, scores, what layers add, and logits."""

from dataclasses import replace

from worker_svc.models.config_file import ConfigJson
from worker_svc.models.families import dense
from worker_svc.models.families.family import Family
from worker_svc.models.spec import AttentionSpec, ModelSpec

KEYS = frozenset(
    {
        "attention_bias",
        "attention_multiplier",
        "embedding_multiplier",
        "logits_scaling",
        "residual_multiplier",
    }
)


def read(config: ConfigJson) -> ModelSpec:
    return decoder(config, mlp_bias=config.flag("mlp_bias"))


def decoder(config: ConfigJson, *, mlp_bias: bool = False) -> ModelSpec:
    """The model whose layers all have attention. Raises UnsupportedModel, naming the key."""
    has_bias = config.flag("attention_bias")
    spec = dense.decoder(config, qkv_bias=has_bias, o_bias=has_bias, mlp_bias=mlp_bias)
    scale = config.above_zero("attention_multiplier", 1.0)
    layers = (
        replace(layer, mixer=replace(layer.mixer, scale=scale))
        for layer in spec.layers
        if isinstance(layer.mixer, AttentionSpec)
    )
    return replace(
        spec,
        layers=tuple(layers),
        embedding_scale=config.above_zero("embedding_multiplier", 1.0),
        residual_scale=config.above_zero("residual_multiplier", 1.0),
        logit_divisor=config.above_zero("logits_scaling", 1.0),
    )


FAMILY = Family("GraniteForCausalLM", "granite", read, keys=KEYS | {"mlp_bias"})
