"""DeepSeek V3, R1 and V3.1: attention over latents; experts in groups, after three dense layers."""

from worker_svc.models.config_file import ConfigJson
from worker_svc.models.families import experts, latents
from worker_svc.models.families.family import Family
from worker_svc.models.spec import ModelSpec

ROUTED = experts.RoutedDefaults(
    256, 8, 2048, 1, renormalizes=True, num_dense=3, scale=2.5, groups=(8, 4)
)


def read(config: ConfigJson) -> ModelSpec:
    return latents.decoder(config, ROUTED)


FAMILY = Family(
    "DeepseekV3ForCausalLM",
    "deepseek_v3",
    read,
    keys=latents.KEYS,
    neutral=latents.NEUTRAL,
    inert=latents.INERT,
)
