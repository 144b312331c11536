"""Qwen3.5: gated delta nets and gated attention, with one MLP in each layer.

The text of the models with pictures is this decoder, too.
"""

from worker_svc.models.config_file import ConfigJson
from worker_svc.models.families import qwen_hybrid
from worker_svc.models.families.family import Family
from worker_svc.models.spec import MlpSpec, ModelSpec

WITH_PICTURES = "Qwen3_5ForConditionalGeneration"


def read(config: ConfigJson) -> ModelSpec:
    spec = qwen_hybrid.decoder(config, MlpSpec(config.positive("intermediate_size")))
    return qwen_hybrid.text_of(spec) if config.architecture == WITH_PICTURES else spec


FAMILY = Family(
    "Qwen3_5ForCausalLM",
    "qwen3_5_text",
    read,
    keys=qwen_hybrid.KEYS,
    neutral=qwen_hybrid.NEUTRAL,
    inert=qwen_hybrid.INERT,
    wrappers=frozenset({WITH_PICTURES}),
)
