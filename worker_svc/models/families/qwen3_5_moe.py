"""Qwen3.5 with experts in each layer, one of them for every token.

The text of the models with pictures is this decoder, too. Released checkpoints have the experts of
a layer in one tensor, others a tensor for each.
"""

from dataclasses import replace

from worker_svc.models.config_file import ConfigJson
from worker_svc.models.families import experts, qwen_hybrid
from worker_svc.models.families.family import Family
from worker_svc.models.spec import DIVIDED, ModelSpec, MoeSpec, RouterSpec

WITH_PICTURES = "Qwen3_5MoeForConditionalGeneration"
STACKED = "experts.gate_up_proj", "experts.down_proj"
# Where config.json has none:
EXPERTS, EXPERTS_PER_TOKEN, INTERMEDIATE_SIZE = 256, 8, 512


def read(config: ConfigJson) -> ModelSpec:
    counts = experts.counts(config, EXPERTS, EXPERTS_PER_TOKEN)
    size = config.positive("moe_intermediate_size", INTERMEDIATE_SIZE)
    shared_size = config.positive("shared_expert_intermediate_size", INTERMEDIATE_SIZE)
    shared = experts.shared(shared_size, size, is_gated=True)
    router = RouterSpec(*counts, renormalizes=True)
    spec = qwen_hybrid.decoder(config, MoeSpec(router, size, shared))
    if config.architecture == WITH_PICTURES:
        spec = qwen_hybrid.text_of(spec)
    stacked = replace(
        spec.names,
        stacks_outputs=STACKED,
        divided={**DIVIDED, **dict(zip(STACKED, (1, 2), strict=True))},
    )
    return replace(spec, names=stacked, other_names=(spec.names,))


FAMILY = Family(
    "Qwen3_5MoeForCausalLM",
    "qwen3_5_moe_text",
    read,
    keys=qwen_hybrid.KEYS
    | experts.KEYS
    | {"moe_intermediate_size", "shared_expert_intermediate_size"},
    neutral=qwen_hybrid.NEUTRAL,
    inert=qwen_hybrid.INERT,
    wrappers=frozenset({WITH_PICTURES}),
)
