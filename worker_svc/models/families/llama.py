"""Llama: biases where the configuration asks for them."""

from dataclasses import replace

from worker_svc.models.config_file import ConfigJson
from worker_svc.models.families import dense
from worker_svc.models.families.family import Family
from worker_svc.models.spec import ModelSpec


def read(config: ConfigJson) -> ModelSpec:
    has_bias = config.flag("attention_bias")
    spec = dense.decoder(
        config,
        qkv_bias=has_bias,
        o_bias=has_bias,
        mlp_bias=config.flag("mlp_bias"),
    )
    # transformers' class has no windows; those of a GGUF file may be meant, as Mistral's are.
    window = None if config.get("use_sliding_window") is False else config.window()
    return replace(spec, unsure_window=window)


FAMILY = Family(
    "LlamaForCausalLM", "llama", read, keys=dense.WINDOW_KEYS | {"attention_bias", "mlp_bias"}
)
