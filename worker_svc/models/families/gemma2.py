"""Gemma 2: every second layer has a window; scores and logits have softcaps."""

from dataclasses import replace
from typing import Any

from worker_svc.models.config_file import ConfigJson
from worker_svc.models.config_rope import rotary
from worker_svc.models.families import gemma
from worker_svc.models.families.family import Family
from worker_svc.models.spec import ModelSpec

PERIOD = 2
SCORES, LOGITS = "attn_logit_softcapping", "final_logit_softcapping"
# Of the configuration class; published files leave most of them out.
DEFAULTS: dict[str, Any] = {
    SCORES: 50.0,
    LOGITS: 30.0,
    "head_dim": 256,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "max_position_embeddings": 8192,
    "num_attention_heads": 8,
    "num_hidden_layers": 26,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-6,
    "sliding_window": 4096,
    "vocab_size": 256_000,
}


def read(config: ConfigJson) -> ModelSpec:
    config = gemma.with_defaults(config, DEFAULTS)
    spec = gemma.decoder(
        config,
        period=PERIOD,
        score_softcap=config.above_zero(SCORES),
        logit_softcap=config.above_zero(LOGITS),
    )
    rope = rotary(config, spec.attentions[0].head_dim)
    return replace(spec, ropes={gemma.WHOLE: rope, gemma.NEAR: rope})


FAMILY = Family(
    "Gemma2ForCausalLM",
    "gemma2",
    read,
    keys=gemma.KEYS | {SCORES, LOGITS},
    neutral=gemma.NEUTRAL,
    inert=gemma.INERT,
)
