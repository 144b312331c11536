"""Qwen3-Next: gated delta nets and gated attention; experts, one of them for every token."""

from worker_svc.models.config_file import ConfigJson
from worker_svc.models.families import experts, qwen_hybrid
from worker_svc.models.families.family import Family
from worker_svc.models.spec import MlpSpec, ModelSpec, MoeSpec, RouterSpec

# Where config.json has none:
EXPERTS, EXPERTS_PER_TOKEN, INTERMEDIATE_SIZE = 512, 10, 512


def read(config: ConfigJson) -> ModelSpec:
    dense = MlpSpec(config.positive("intermediate_size"))
    router = RouterSpec(
        *experts.counts(config, EXPERTS, EXPERTS_PER_TOKEN),
        renormalizes=config.flag("norm_topk_prob", True),
    )
    size = config.positive("moe_intermediate_size", INTERMEDIATE_SIZE)
    shared_size = config.positive("shared_expert_intermediate_size", INTERMEDIATE_SIZE)
    feed = MoeSpec(router, size, experts.shared(shared_size, size, is_gated=True))
    return experts.sparse(config, qwen_hybrid.decoder(config, dense, is_grouped=True), feed)


FAMILY = Family(
    "Qwen3NextForCausalLM",
    "qwen3_next",
    read,
    keys=qwen_hybrid.KEYS
    | experts.KEYS
    | experts.SPARSE_KEYS
    | {"moe_intermediate_size", "norm_topk_prob", "shared_expert_intermediate_size"},
    neutral=qwen_hybrid.NEUTRAL,
    inert=qwen_hybrid.INERT,
)
