"""GLM-4.5, 4.6 and 4.7: half of each head is rotated; experts after a few layers with one MLP."""

from dataclasses import replace

from worker_svc.models.config_file import ConfigJson
from worker_svc.models.families import dense, experts
from worker_svc.models.families.family import Family
from worker_svc.models.spec import ModelSpec, TensorNames

PART = 0.5  # of each head that is rotated, where config.json says none
DRAFTING = "num_nextn_predict_layers"
ROUTED = experts.RoutedDefaults(128, 8, 1408, 1, renormalizes=True, num_dense=1)
NAMES = TensorNames(shared_expert="shared_experts")


def read(config: ConfigJson) -> ModelSpec:
    spec = dense.decoder(
        config,
        qkv_bias=config.flag("attention_bias"),
        qk_norm=config.flag("use_qk_norm"),
        default_part=PART,
    )
    spec = experts.routed(config, spec, ROUTED)
    drafting = experts.drafting_layers(spec, config.count(DRAFTING, 1))
    return replace(spec, names=NAMES, other_parts=drafting)


FAMILY = Family(
    "Glm4MoeForCausalLM",
    "glm4_moe",
    read,
    keys=experts.ROUTED_KEYS | {DRAFTING, "attention_bias", "use_qk_norm"},
)
