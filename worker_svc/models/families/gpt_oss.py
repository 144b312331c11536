"""gpt-oss: sinks and windows in attention; experts with biases and a clamped activation."""

from dataclasses import replace

from kernels.expert_clamp import Clamp
from worker_svc.models.config_file import ConfigJson
from worker_svc.models.families import dense, experts
from worker_svc.models.families.family import Family
from worker_svc.models.spec import (
    LayerSpec,
    ModelSpec,
    MoeSpec,
    RouterSpec,
    TensorNames,
    UnsupportedModel,
)

# Where config.json has none:
EXPERTS, EXPERTS_PER_TOKEN, WINDOW, THETA = 128, 4, 128, 150_000.0
LIMIT, ALPHA = 7.0, 1.702
ROTATION = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
NAMES = TensorNames(router="router", logit_bias="router.bias", stacks_experts=True)


def read(config: ConfigJson) -> ModelSpec:
    if not config.get("rope_parameters") and not config.get("rope_scaling"):
        config = replace(config, values={**config.values, "rope_scaling": ROTATION})
    has_bias = config.flag("attention_bias", True)
    spec = dense.decoder(
        config, qkv_bias=has_bias, o_bias=has_bias, may_slide=True, default_theta=THETA
    )
    slides = [index % 2 == 0 for index in range(spec.num_layers)]
    spec = dense.windowed(config, spec, config.window(absent=WINDOW), slides)
    # Chosen by their logits, of which the softmax is; as is that of all, divided by their sum.
    router = RouterSpec(*_counts(config), renormalizes=True, has_logit_bias=True)
    clamp = Clamp(
        config.above_zero("swiglu_limit", LIMIT), config.above_zero("swiglu_alpha", ALPHA)
    )
    size = config.positive("intermediate_size")
    feed = MoeSpec(router, size, bias=True, clamp=clamp)
    layers = tuple(_layer(layer, feed) for layer in spec.layers)
    return replace(spec, layers=layers, names=NAMES)


def _layer(layer: LayerSpec, feed: MoeSpec) -> LayerSpec:
    return replace(layer, mixer=replace(layer.attention, has_sinks=True), feed=feed)


def _counts(config: ConfigJson) -> tuple[int, int]:
    """(experts of a layer, experts of a token). Raises UnsupportedModel."""
    num_experts, top_k = experts.counts(config, EXPERTS, EXPERTS_PER_TOKEN)
    if config.positive("experts_per_token", top_k) != top_k:
        raise UnsupportedModel(
            "experts_per_token: differs from num_experts_per_tok, and only one can hold"
        )
    return num_experts, top_k


FAMILY = Family(
    "GptOssForCausalLM",
    "gpt_oss",
    read,
    keys=experts.KEYS
    | {"attention_bias", "experts_per_token", "sliding_window", "swiglu_alpha", "swiglu_limit"},
    # Of the rotation, whose own key says it.
    inert=frozenset({"initial_context_length"}),
)
