"""dots.llm1: Qwen3's attention; experts chosen by sigmoids, and one that every token has."""

from dataclasses import replace

from worker_svc.models.config_file import ConfigJson
from worker_svc.models.families import dense, experts
from worker_svc.models.families.family import Family
from worker_svc.models.spec import ModelSpec, MoeSpec, RouterSpec, TensorNames, UnsupportedModel

COUNTS = ("n_routed_experts", "num_local_experts")
INTERMEDIATE_SIZE, WINDOW, FULL_LAYERS = 1408, 4096, 62  # where config.json has none
NAMES = TensorNames(shared_expert="shared_experts")


def read(config: ConfigJson) -> ModelSpec:
    has_bias = config.flag("attention_bias")
    spec = dense.decoder(config, qkv_bias=has_bias, o_bias=has_bias, qk_norm=True, may_slide=True)
    spec = _windowed(config, spec)
    for name in ("n_group", "topk_group"):
        if config.positive(name, 1) > 1:
            raise UnsupportedModel(f"{name}: groups of experts are not supported, only 1 is")
    router = RouterSpec(
        *experts.counts(config, None, None, COUNTS),
        renormalizes=config.flag("norm_topk_prob"),
        is_sigmoid=True,
        has_bias=True,
        scale=_scale(config),
    )
    size = config.positive("moe_intermediate_size", INTERMEDIATE_SIZE)
    shared = experts.shared(size * config.positive("n_shared_experts"), size, is_gated=False)
    feed = MoeSpec(router, size, shared)
    num_dense = config.get("first_k_dense_replace") or 0
    if type(num_dense) is not int or num_dense < 0:
        raise UnsupportedModel(f"first_k_dense_replace: {num_dense!r} is no number of layers")
    layers = (
        layer if index < num_dense else replace(layer, feed=feed)
        for index, layer in enumerate(spec.layers)
    )
    return replace(spec, layers=tuple(layers), names=NAMES)


def _windowed(config: ConfigJson, spec: ModelSpec) -> ModelSpec:
    """The model with a window on its layers from `max_window_layers` on."""
    num_full = config.positive("max_window_layers", FULL_LAYERS)
    slides = [index >= num_full for index in range(spec.num_layers)]
    return dense.windowed(config, spec, config.window(absent=WINDOW), slides)


def _scale(config: ConfigJson) -> float:
    scale = config.get("routed_scaling_factor")
    if scale is not None and (not isinstance(scale, int | float) or isinstance(scale, bool)):
        raise UnsupportedModel(f"routed_scaling_factor: {scale!r} is no number")
    return 1.0 if scale is None else float(scale)


FAMILY = Family(
    "Dots1ForCausalLM",
    "dots1",
    read,
    keys=frozenset(COUNTS)
    | {
        "attention_bias",
        "first_k_dense_replace",
        "max_window_layers",
        "moe_intermediate_size",
        "n_group",
        "n_shared_experts",
        "norm_topk_prob",
        "num_experts_per_tok",
        "routed_scaling_factor",
        "sliding_window",
        "topk_group",
    },
)
