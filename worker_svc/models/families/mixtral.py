"""Mixtral: Mistral's attention, and experts in every layer."""

from dataclasses import replace

from worker_svc.models.config_file import ConfigJson
from worker_svc.models.families import dense, experts
from worker_svc.models.families.family import Family
from worker_svc.models.spec import DIVIDED, ModelSpec, MoeSpec, RouterSpec, TensorNames

EXPERTS, EXPERTS_PER_TOKEN, THETA = 8, 2, 1_000_000.0  # where config.json has none
NAMES = TensorNames(
    mlp="block_sparse_moe",
    expert_gate="w1",
    expert_up="w3",
    expert_down="w2",
    divided={**DIVIDED, "w1.weight": 0, "w3.weight": 0, "w2.weight": 1},
)


def read(config: ConfigJson) -> ModelSpec:
    spec = dense.decoder(config, may_slide=True, default_theta=THETA)
    spec = dense.windowed_throughout(config, spec, config.window())
    router = RouterSpec(*experts.counts(config, EXPERTS, EXPERTS_PER_TOKEN), renormalizes=True)
    feed = MoeSpec(router, config.positive("intermediate_size"))
    layers = tuple(replace(layer, feed=feed) for layer in spec.layers)
    return replace(spec, layers=layers, names=NAMES)


FAMILY = Family("MixtralForCausalLM", "mixtral", read, keys=dense.WINDOW_KEYS | experts.KEYS)
