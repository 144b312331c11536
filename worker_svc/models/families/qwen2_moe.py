"""Qwen2 with experts: an expert of every token next to those that are chosen."""

from worker_svc.models.config_file import ConfigJson
from worker_svc.models.families import dense, experts
from worker_svc.models.families.family import Family
from worker_svc.models.spec import ModelSpec, MoeSpec, RouterSpec

# Where config.json has none:
EXPERTS, EXPERTS_PER_TOKEN, INTERMEDIATE_SIZE, SHARED_SIZE = 60, 4, 1408, 5632


def read(config: ConfigJson) -> ModelSpec:
    spec = dense.decoder(config, qkv_bias=config.flag("qkv_bias", True), may_slide=True)
    spec = _windowed(config, spec)
    router = RouterSpec(
        *experts.counts(config, EXPERTS, EXPERTS_PER_TOKEN),
        renormalizes=config.flag("norm_topk_prob"),
    )
    size = config.positive("moe_intermediate_size", INTERMEDIATE_SIZE)
    shared_size = config.positive("shared_expert_intermediate_size", SHARED_SIZE)
    feed = MoeSpec(router, size, experts.shared(shared_size, size, is_gated=True))
    return experts.sparse(config, spec, feed)


def _windowed(config: ConfigJson, spec: ModelSpec) -> ModelSpec:
    """The model with a window, if it is in use, on every second layer up to `max_window_layers`."""
    last = config.positive("max_window_layers", dense.QWEN_FULL_LAYERS)
    slides = [index % 2 == 0 and index < last for index in range(spec.num_layers)]
    return dense.windowed(config, spec, dense.qwen_window(config), slides)


FAMILY = Family(
    "Qwen2MoeForCausalLM",
    "qwen2_moe",
    read,
    keys=dense.QWEN_KEYS
    | experts.KEYS
    | experts.SPARSE_KEYS
    | {
        "moe_intermediate_size",
        "norm_topk_prob",
        "qkv_bias",
        "shared_expert_intermediate_size",
    },
)
