"""Qwen3 with experts: Qwen3's attention; some layers may keep one MLP."""

from dataclasses import replace

from worker_svc.models.config_file import ConfigJson
from worker_svc.models.families import dense, experts, qwen3
from worker_svc.models.families.family import Family
from worker_svc.models.spec import ModelSpec, MoeSpec, UnsupportedModel

# Where config.json has none:
EXPERTS, EXPERTS_PER_TOKEN, INTERMEDIATE_SIZE = 128, 8, 768


def read(config: ConfigJson) -> ModelSpec:
    in_use = bool(config.get("use_sliding_window"))
    window = config.window(absent=dense.QWEN_WINDOW) if in_use else None
    # Of all layers: this class of transformers does not count them, as Qwen3's does.
    spec = dense.windowed_throughout(config, qwen3.without_windows(config), window)
    feed = MoeSpec(
        *experts.counts(config, EXPERTS, EXPERTS_PER_TOKEN),
        config.positive("moe_intermediate_size", INTERMEDIATE_SIZE),
        renormalizes=config.flag("norm_topk_prob"),
    )
    layers = (
        replace(layer, feed=feed) if has_experts else layer
        for layer, has_experts in zip(spec.layers, _has_experts(config, spec), strict=True)
    )
    return replace(spec, layers=tuple(layers))


def _has_experts(config: ConfigJson, spec: ModelSpec) -> list[bool]:
    """True for each layer with experts. Raises UnsupportedModel."""
    step = config.positive("decoder_sparse_step", 1)
    dense_layers = config.get("mlp_only_layers") or []
    if not isinstance(dense_layers, list) or any(type(each) is not int for each in dense_layers):
        raise UnsupportedModel(f"mlp_only_layers: {dense_layers!r} is no list of integers")
    return [
        index not in dense_layers and (index + 1) % step == 0 for index in range(spec.num_layers)
    ]


FAMILY = Family(
    "Qwen3MoeForCausalLM",
    "qwen3_moe",
    read,
    keys=dense.WINDOW_KEYS
    | experts.KEYS
    | {
        "attention_bias",
        "decoder_sparse_step",
        "mlp_only_layers",
        "moe_intermediate_size",
        "norm_topk_prob",
    },
)
