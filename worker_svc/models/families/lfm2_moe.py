"""LFM2 with experts, chosen by sigmoids, in all layers but the first ones."""

from dataclasses import replace

from worker_svc.models.config_file import ConfigJson
from worker_svc.models.families import experts, lfm2
from worker_svc.models.families.family import Family
from worker_svc.models.spec import ModelSpec, MoeSpec, RouterSpec, UnsupportedModel

# Where config.json has none:
EXPERTS, EXPERTS_PER_TOKEN, INTERMEDIATE_SIZE, DENSE_LAYERS = 32, 4, 1792, 2
EPSILON = 1e-6  # that is added to the sum of a token's weights
NAMES = replace(
    lfm2.NAMES, router_bias="expert_bias", expert_gate="w1", expert_up="w3", expert_down="w2"
)


def read(config: ConfigJson) -> ModelSpec:
    kinds = config.required("layer_types")
    spec = lfm2.decoder(config, kinds, config.positive("intermediate_size"))
    router = RouterSpec(
        *experts.counts(config, EXPERTS, EXPERTS_PER_TOKEN),
        renormalizes=config.flag("norm_topk_prob", True),
        is_sigmoid=True,
        has_bias=config.flag("use_expert_bias", True),
        scale=config.above_zero("routed_scaling_factor", 1.0),
        epsilon=EPSILON,
    )
    feed = MoeSpec(router, config.positive("moe_intermediate_size", INTERMEDIATE_SIZE))
    num_dense = config.values.get("num_dense_layers", DENSE_LAYERS)
    if type(num_dense) is not int or num_dense < 0:
        raise UnsupportedModel(f"num_dense_layers: {num_dense!r} is no number of layers")
    layers = (
        layer if index < num_dense else replace(layer, feed=feed)
        for index, layer in enumerate(spec.layers)
    )
    return replace(spec, layers=tuple(layers), names=NAMES)


FAMILY = Family(
    "Lfm2MoeForCausalLM",
    "lfm2_moe",
    read,
    keys=lfm2.KEYS
    | experts.KEYS
    | {
        "moe_intermediate_size",
        "norm_topk_prob",
        "num_dense_layers",
        "routed_scaling_factor",
        "use_expert_bias",
    },
)
