"""GLM-4.7-Flash: DeepSeek V3's attention over latents; experts after a few layers with one MLP."""

from dataclasses import replace

from worker_svc.models.config_file import ConfigJson
from worker_svc.models.families import experts, latents
from worker_svc.models.families.family import Family
from worker_svc.models.spec import ModelSpec, UnsupportedModel

FEEDS, NUM_DENSE = "mlp_layer_types", "first_k_dense_replace"
DENSE, SPARSE = "dense", "sparse"
ROUTED = experts.RoutedDefaults(64, 4, 1536, 1, renormalizes=True, num_dense=1, scale=1.8)


def read(config: ConfigJson) -> ModelSpec:
    kinds = config.get(FEEDS)
    if kinds is not None:
        num_dense = kinds.count(DENSE) if isinstance(kinds, list) else 0
        num_sparse = config.positive("num_hidden_layers") - num_dense
        if kinds != [DENSE] * num_dense + [SPARSE] * num_sparse:
            raise UnsupportedModel(f"{FEEDS}: only {DENSE!r} layers first, then {SPARSE!r} ones")
        if config.count(NUM_DENSE, num_dense) != num_dense:
            raise UnsupportedModel(f"{NUM_DENSE}: differs from {FEEDS}, and only one can hold")
        config = replace(config, values={**config.values, NUM_DENSE: num_dense})
    return latents.decoder(config, ROUTED)


FAMILY = Family(
    "Glm4MoeLiteForCausalLM",
    "glm4_moe_lite",
    read,
    keys=latents.KEYS | {FEEDS},
    neutral=latents.NEUTRAL,
    inert=latents.INERT,
)
