"""Granite 4, and Granite before it: what config.json says, and what is refused of it by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from worker_svc.models import config as model_config
from worker_svc.models.sharding import Sharding
from worker_svc.models.spec import (
    AttentionSpec,
    Mamba2Spec,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    RouterSpec,
    SharedSpec,
    UnsupportedModel,
)

KINDS = ["attention" if index in (5, 15, 25, 35) else "mamba" for index in range(40)]
# As published for Granite-4.0-H-Tiny.
TINY: dict[str, Any] = {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attention_multiplier": 0.0078125,
    "bos_token_id": 100257,
    "embedding_multiplier": 12,
    "eos_token_id": 100257,
    "hidden_act": "silu",
    "hidden_size": 1536,
    "init_method": "mup",
    "initializer_range": 0.1,
    "intermediate_size": 512,
    "layer_types": KINDS,
    "logits_scaling": 6,
    "mamba_chunk_size": 256,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 48,
    "mamba_proj_bias": False,
    "max_position_embeddings": 131072,
    "model_type": "granitemoehybrid",
    "normalization_function": "rmsnorm",
    "num_attention_heads": 12,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 40,
    "num_key_value_heads": 4,
    "num_local_experts": 64,
    "output_router_logits": False,
    "pad_token_id": 100256,
    "position_embedding_type": "nope",
    "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000,
    "router_aux_loss_coef": 0.0001,
    "shared_intermediate_size": 1024,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.56.0",
    "use_cache": True,
    "vocab_size": 100352,
}
# As published for Granite-3.3-8B.
DENSE: dict[str, Any] = {
    "architectures": ["GraniteForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attention_multiplier": 0.0078125,
    "bos_token_id": 0,
    "embedding_multiplier": 12.0,
    "eos_token_id": 0,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 12800,
    "logits_scaling": 16.0,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "granite",
    "num_attention_heads": 32,
    "num_hidden_layers": 40,
    "num_key_value_heads": 8,
    "pad_token_id": 0,
    "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.49.0",
    "use_cache": True,
    "vocab_size": 49159,
}


def load(tmp_path: Path, base: dict[str, Any], **changes: Any) -> ModelSpec:
    raw = {name: value for name, value in (base | changes).items() if value is not ...}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    return model_config.load(tmp_path)


def test_the_published_configuration_of_a_hybrid_is_read(tmp_path: Path) -> None:
    spec = load(tmp_path, TINY)
    mamba = Mamba2Spec(48, 64, num_groups=1, state_size=128, width=4, norm_eps=1e-5)
    attention = AttentionSpec(12, 4, 128, rope=None, scale=0.0078125)
    expected = [attention if kind == "attention" else mamba for kind in KINDS]
    assert [layer.mixer for layer in spec.layers] == expected
    feed = MoeSpec(RouterSpec(64, 6, renormalizes=True), 512, SharedSpec(2, is_gated=False))
    assert {layer.feed for layer in spec.layers} == {feed}
    assert (spec.embedding_scale, spec.residual_scale, spec.logit_divisor) == (12.0, 0.22, 6.0)


def test_the_published_configuration_before_it_is_read(tmp_path: Path) -> None:
    spec = load(tmp_path, DENSE)
    assert spec.attention == AttentionSpec(32, 8, 128, rope=None)
    assert {layer.mixer.rope for layer in spec.layers if layer.mixer} == {"rope"}
    assert {layer.mixer.scale for layer in spec.layers if layer.mixer} == {0.0078125}
    assert (spec.embedding_scale, spec.residual_scale, spec.logit_divisor) == (12.0, 0.22, 16.0)


def test_a_model_without_experts_has_one_mlp_a_layer_and_may_rotate(tmp_path: Path) -> None:
    changes = {"num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 8192}
    spec = load(tmp_path, TINY, **changes, position_embedding_type="rope")
    assert {layer.feed for layer in spec.layers} == {MlpSpec(8192)}
    assert {attention.rope for attention in spec.attentions} == {"rope"}


@pytest.mark.parametrize(
    ("base", "named", "changes"),
    [
        (TINY, "layer_types: 40 entries for 3 layers", {"num_hidden_layers": 3}),
        (TINY, "layer_types: 'moe'", {"layer_types": ["moe"] * 40}),
        (TINY, "layer_types: no layer has attention", {"layer_types": ["mamba"] * 40}),
        (TINY, "layer_types: no layer has attention", {"layer_types": ...}),
        (TINY, "mamba_d_head: 48 heads of 32 are not the 3072", {"mamba_d_head": 32}),
        (TINY, "position_embedding_type", {"position_embedding_type": "alibi"}),
        (TINY, "shared_intermediate_size: 1000 is no", {"shared_intermediate_size": 1000}),
        (TINY, "num_experts_per_tok: 65 of 64", {"num_experts_per_tok": 65}),
        (TINY, "time_step_limit", {"time_step_limit": [0.001, 0.1]}),
        (TINY, "normalization_function", {"normalization_function": "layernorm"}),
        (TINY, "residual_multiplier: 0 is no number above 0", {"residual_multiplier": 0}),
        (TINY, "hidden_act", {"hidden_act": "gelu"}),
        (TINY, "mlp_bias", {"mlp_bias": True}),
        (DENSE, "logits_scaling: 'x' is no number above 0", {"logits_scaling": "x"}),
        (DENSE, "mamba_n_heads", {"mamba_n_heads": 4}),
        (DENSE, "a_key_of_tomorrow", {"a_key_of_tomorrow": 1}),
    ],
)
def test_what_is_not_served_is_refused_by_name(
    tmp_path: Path, base: dict[str, Any], named: str, changes: dict[str, Any]
) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        load(tmp_path, base, **changes)


def test_ranks_do_not_divide_a_hybrid(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"^tensor_parallel_size: 2 ranks .* gate and up"):
        Sharding(load(tmp_path, TINY), 0, 2)
