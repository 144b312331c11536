"""Qwen3: a norm of each head's queries and keys."""

from worker_svc.models.config_file import ConfigJson
from worker_svc.models.families import dense
from worker_svc.models.families.family import Family
from worker_svc.models.spec import ModelSpec


def read(config: ConfigJson) -> ModelSpec:
    return dense.windowed_as_qwen(config, without_windows(config))


def without_windows(config: ConfigJson) -> ModelSpec:
    """The model as if all its layers saw all tokens. Raises UnsupportedModel."""
    has_bias = config.flag("attention_bias")
    return dense.decoder(config, qkv_bias=has_bias, o_bias=has_bias, qk_norm=True, may_slide=True)


FAMILY = Family("Qwen3ForCausalLM", "qwen3", read, keys=dense.QWEN_KEYS | {"attention_bias"})
