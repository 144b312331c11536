"""Qwen2 and 2.5: biases on queries, keys and values alone."""

from worker_svc.models.config_file import ConfigJson
from worker_svc.models.families import dense
from worker_svc.models.families.family import Family
from worker_svc.models.spec import ModelSpec


def read(config: ConfigJson) -> ModelSpec:
    return dense.windowed_as_qwen(config, dense.decoder(config, qkv_bias=True, may_slide=True))


FAMILY = Family(
    "Qwen2ForCausalLM",
    "qwen2",
    read,
    keys=dense.QWEN_KEYS,
    # It has its biases whatever this says; the checkpoint has to hold just these.
    neutral={"attention_bias": (False, True)},
)
