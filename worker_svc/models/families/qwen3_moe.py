"""Qwen3 with experts: Qwen3's attention; some layers may keep one MLP."""

from worker_svc.models.config_file import ConfigJson
from worker_svc.models.families import dense, experts, qwen3
from worker_svc.models.families.family import Family
from worker_svc.models.spec import ModelSpec, MoeSpec, RouterSpec

# Where config.json has none:
EXPERTS, EXPERTS_PER_TOKEN, INTERMEDIATE_SIZE = 128, 8, 768


def read(config: ConfigJson) -> ModelSpec:
    # Of all layers: this class of transformers does not count them, as Qwen3's does.
    window = dense.qwen_window(config)
    spec = dense.windowed_throughout(config, qwen3.without_windows(config), window)
    router = RouterSpec(
        *experts.counts(config, EXPERTS, EXPERTS_PER_TOKEN),
        renormalizes=config.flag("norm_topk_prob"),
    )
    size = config.positive("moe_intermediate_size", INTERMEDIATE_SIZE)
    return experts.sparse(config, spec, MoeSpec(router, size))


FAMILY = Family(
    "Qwen3MoeForCausalLM",
    "qwen3_moe",
    read,
    keys=dense.WINDOW_KEYS
    | experts.KEYS
    | experts.SPARSE_KEYS
    | {"attention_bias", "moe_intermediate_size", "norm_topk_prob"},
)
