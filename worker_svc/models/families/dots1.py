"""dots.llm1: Qwen3's attention; experts chosen by sigmoids, and one that every token has."""

from dataclasses import replace

from worker_svc.models.config_file import ConfigJson
from worker_svc.models.families import dense, experts
from worker_svc.models.families.family import Family
from worker_svc.models.spec import ModelSpec, TensorNames, UnsupportedModel

WINDOW, FULL_LAYERS = 4096, 62  # where config.json has none
ROUTED = experts.RoutedDefaults(None, None, 1408, None, renormalizes=False)
NAMES = TensorNames(shared_expert="shared_experts")


def read(config: ConfigJson) -> ModelSpec:
    has_bias = config.flag("attention_bias")
    spec = dense.decoder(config, qkv_bias=has_bias, o_bias=has_bias, qk_norm=True, may_slide=True)
    spec = _windowed(config, spec)
    for name in ("n_group", "topk_group"):
        if config.positive(name, 1) > 1:
            raise UnsupportedModel(f"{name}: groups of experts are not supported, only 1 is")
    return replace(experts.routed(config, spec, ROUTED), names=NAMES)


def _windowed(config: ConfigJson, spec: ModelSpec) -> ModelSpec:
    """The model with a window on its layers from `max_window_layers` on."""
    num_full = config.positive("max_window_layers", FULL_LAYERS)
    slides = [index >= num_full for index in range(spec.num_layers)]
    return dense.windowed(config, spec, config.window(absent=WINDOW), slides)


FAMILY = Family(
    "Dots1ForCausalLM",
    "dots1",
    read,
    keys=experts.ROUTED_KEYS | {"attention_bias", "max_window_layers", "sliding_window"},
)
