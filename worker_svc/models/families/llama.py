"""Llama: biases where the configuration asks for them."""

from worker_svc.models.config_file import ConfigJson
from worker_svc.models.families import dense
from worker_svc.models.families.family import Family
from worker_svc.models.spec import ModelSpec


def read(config: ConfigJson) -> ModelSpec:
    has_bias = config.flag("attention_bias")
    return dense.decoder(
        config,
        qkv_bias=has_bias,
        o_bias=has_bias,
        mlp_bias=config.flag("mlp_bias"),
        window=None if config.get("use_sliding_window") is False else config.window(),
    )


FAMILY = Family(
    "LlamaForCausalLM", "llama", read, keys=dense.WINDOW_KEYS | {"attention_bias", "mlp_bias"}
)
