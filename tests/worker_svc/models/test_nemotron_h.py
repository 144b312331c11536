"""Nemotron-H: what its config.json says, and what is refused of it by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from worker_svc.models import config as model_config
from worker_svc.models.spec import (
    Activation,
    AttentionSpec,
    LayerSpec,
    Mamba2Spec,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    RouterSpec,
    SharedSpec,
    UnsupportedModel,
)

# As published for Nemotron-3-Nano-30B-A3B.
NANO: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_nemotron_h.NemotronHConfig"},
    "bos_token_id": 1,
    "chunk_size": 128,
    "conv_kernel": 4,
    "eos_token_id": 2,
    "expand": 2,
    "head_dim": 128,
    "hidden_dropout": 0.0,
    "hidden_size": 2688,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "initializer_range": 0.02,
    "intermediate_size": 1856,
    "layer_norm_epsilon": 1e-05,
    "mamba_head_dim": 64,
    "mamba_hidden_act": "silu",
    "mamba_num_heads": 64,
    "mamba_proj_bias": False,
    "mamba_ssm_cache_dtype": "float32",
    "max_position_embeddings": 262144,
    "mlp_bias": False,
    "mlp_hidden_act": "relu2",
    "model_type": "nemotron_h",
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "n_group": 1,
    "n_groups": 8,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_eps": 1e-05,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 52,
    "num_key_value_heads": 2,
    "num_logits_to_keep": 1,
    "pad_token_id": 0,
    "partial_rotary_factor": 1.0,
    "rescale_prenorm_residual": True,
    "residual_in_fp32": False,
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "sliding_window": None,
    "ssm_state_size": 128,
    "tie_word_embeddings": False,
    "time_step_floor": 0.0001,
    "time_step_limit": [0.0, float("inf")],
    "time_step_max": 0.1,
    "time_step_min": 0.001,
    "topk_group": 1,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.55.4",
    "use_bias": False,
    "use_cache": True,
    "use_conv_bias": True,
    "use_mamba_kernels": True,
    "vocab_size": 131072,
}
MAMBA = Mamba2Spec(64, 64, num_groups=8, state_size=128, width=4, norm_eps=1e-5)
ATTENTION = AttentionSpec(32, 2, 128, rope=None)
EXPERTS = MoeSpec(
    RouterSpec(128, 6, renormalizes=True, is_sigmoid=True, has_bias=True, scale=2.5),
    1856,
    SharedSpec(2, is_gated=False),
    activation=Activation.RELU2,
)


def load(tmp_path: Path, **changes: Any) -> ModelSpec:
    raw = {name: value for name, value in (NANO | changes).items() if value is not ...}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    return model_config.load(tmp_path)


def test_the_published_configuration_is_read(tmp_path: Path) -> None:
    spec = load(tmp_path)
    of_letters = {
        "M": LayerSpec(MAMBA, None),
        "*": LayerSpec(ATTENTION, None),
        "E": LayerSpec(None, EXPERTS),
    }
    assert list(spec.layers) == [of_letters[letter] for letter in NANO["hybrid_override_pattern"]]
    assert (spec.rms_norm_eps, spec.tie_word_embeddings) == (1e-5, False)


@pytest.mark.parametrize(
    "kinds",
    [
        {"layers_block_type": ["linear_attention", "mlp", "full_attention"]},
        {"layers_block_type": ["mamba", "mlp", "attention"]},
        {"layer_types": ["linear_attention", "mlp", "full_attention"]},
        {"hybrid_override_pattern": "M-*"},
    ],
)
def test_layers_are_listed_in_four_ways(tmp_path: Path, kinds: dict[str, Any]) -> None:
    spec = load(tmp_path, **{"hybrid_override_pattern": ..., "num_hidden_layers": ...} | kinds)
    mlp = MlpSpec(1856, activation=Activation.RELU2)
    assert spec.layers == (
        LayerSpec(MAMBA, None),
        LayerSpec(None, mlp),
        LayerSpec(ATTENTION, None),
    )


@pytest.mark.parametrize(
    ("named", "changes"),
    [
        ("layers_block_type: 'X'", {"hybrid_override_pattern": "MX*", "num_hidden_layers": 3}),
        ("layers_block_type: no layer is 'full_attention'", {"hybrid_override_pattern": "ME"}),
        ("layers_block_type: no layer is 'linear_attention'", {"hybrid_override_pattern": "*E"}),
        ("num_hidden_layers: 52 types of layers for 3", {"num_hidden_layers": 3}),
        ("n_group", {"n_group": 2}),
        ("topk_group", {"topk_group": 2}),
        ("moe_latent_size", {"moe_latent_size": 1024}),
        ("moe_shared_expert_intermediate_size: 3712 is no", {"moe_intermediate_size": 1000}),
        ("n_shared_experts", {"n_shared_experts": 2}),
        ("num_nextn_predict_layers", {"num_nextn_predict_layers": 1}),
        ("mlp_hidden_act", {"mlp_hidden_act": "silu"}),
        ("mamba_hidden_act", {"mamba_hidden_act": "gelu"}),
        ("mamba_ssm_cache_dtype", {"mamba_ssm_cache_dtype": "bfloat16"}),
        ("time_step_limit", {"time_step_limit": [0.001, 0.1]}),
        ("residual_in_fp32", {"residual_in_fp32": True}),
        ("use_bias", {"use_bias": True}),
        ("mlp_bias", {"mlp_bias": True}),
        ("sliding_window", {"sliding_window": 64}),
        ("a_key_of_tomorrow", {"a_key_of_tomorrow": 1}),
    ],
)
def test_what_is_not_served_is_refused_by_name(
    tmp_path: Path, named: str, changes: dict[str, Any]
) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        load(tmp_path, **changes)
