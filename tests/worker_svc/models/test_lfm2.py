"""LFM2, dense and with experts: what their config.json says, and what is refused of it by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from worker_svc.models import config as model_config
from worker_svc.models.spec import (
    AttentionSpec,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    RouterSpec,
    ShortConvSpec,
    UnsupportedModel,
)

# As published for LFM2.5-1.2B.
LFM2: dict[str, Any] = {
    "architectures": ["Lfm2ForCausalLM"],
    "block_auto_adjust_ff_dim": True,
    "block_dim": 2048,
    "block_ff_dim": 12288,
    "block_ffn_dim_multiplier": 1.0,
    "block_mlp_init_scale": 1.0,
    "block_multiple_of": 256,
    "block_norm_eps": 1e-05,
    "block_out_init_scale": 1.0,
    "block_use_swiglu": True,
    "block_use_xavier_init": True,
    "bos_token_id": 1,
    "conv_L_cache": 3,
    "conv_bias": False,
    "conv_dim": 2048,
    "conv_dim_out": 2048,
    "conv_use_xavier_init": True,
    "eos_token_id": 7,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "max_position_embeddings": 128000,
    "model_type": "lfm2",
    "norm_eps": 1e-05,
    "num_attention_heads": 32,
    "num_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pad_token_id": 0,
    "rope_theta": 1000000.0,
    "theta": 1000000.0,
    "tie_embedding": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.54.0.dev0",
    "use_cache": True,
    "use_pos_enc": True,
    "vocab_size": 65536,
}
KINDS = ["conv" if index not in (2, 6, 10, 14, 18, 21) else "full_attention" for index in range(24)]
# As published for LFM2-8B-A1B.
LFM2_MOE: dict[str, Any] = {
    "architectures": ["Lfm2MoeForCausalLM"],
    "bos_token_id": 1,
    "conv_L_cache": 3,
    "conv_bias": False,
    "dtype": "bfloat16",
    "eos_token_id": 7,
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 7168,
    "layer_types": KINDS,
    "max_position_embeddings": 128000,
    "model_type": "lfm2_moe",
    "moe_intermediate_size": 1792,
    "norm_eps": 1e-05,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_dense_layers": 2,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "pad_token_id": 0,
    "rope_theta": 1000000.0,
    "routed_scaling_factor": 1.0,
    "tie_word_embeddings": True,
    "transformers_version": "4.56.0.dev0",
    "use_cache": True,
    "use_expert_bias": True,
    "vocab_size": 65536,
}


def load(tmp_path: Path, base: dict[str, Any], **changes: Any) -> ModelSpec:
    raw = {name: value for name, value in (base | changes).items() if value is not ...}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    return model_config.load(tmp_path)


def test_the_published_configuration_is_read(tmp_path: Path) -> None:
    spec = load(tmp_path, LFM2)
    attention = AttentionSpec(32, 8, 64, "rope", qk_norm=True)
    conv = ShortConvSpec(2048, 3)
    assert [layer.mixer for layer in spec.layers] == [
        attention if index in LFM2["full_attn_idxs"] else conv for index in range(16)
    ]
    assert {layer.feed for layer in spec.layers} == {MlpSpec(8192)}
    assert (spec.rms_norm_eps, spec.tie_word_embeddings) == (1e-5, True)
    assert {rope.theta for rope in spec.ropes.values()} == {1e6}


def test_the_published_configuration_with_experts_is_read(tmp_path: Path) -> None:
    spec = load(tmp_path, LFM2_MOE)
    router = RouterSpec(
        32, 4, renormalizes=True, is_sigmoid=True, has_bias=True, scale=1.0, epsilon=1e-6
    )
    feeds = [layer.feed for layer in spec.layers]
    assert feeds == [MlpSpec(7168)] * 2 + [MoeSpec(router, 1792)] * 22
    kinds = [isinstance(layer.mixer, ShortConvSpec) for layer in spec.layers]
    assert kinds == [kind == "conv" for kind in KINDS]


@pytest.mark.parametrize(
    ("changes", "size"),
    [
        ({"block_ff_dim": ..., "intermediate_size": 300}, 256),
        ({"block_ff_dim": 300, "intermediate_size": 12}, 256),
        ({"block_ff_dim": 300, "block_multiple_of": 128, "block_ffn_dim_multiplier": 1.5}, 384),
        ({"block_ff_dim": 300, "block_ffn_dim_multiplier": None}, 200),
        ({"block_ff_dim": 300, "block_auto_adjust_ff_dim": False}, 300),
    ],
)
def test_the_size_of_an_mlp_is_adjusted_as_in_transformers(
    tmp_path: Path, changes: dict[str, Any], size: int
) -> None:
    assert {layer.feed for layer in load(tmp_path, LFM2, **changes).layers} == {MlpSpec(size)}


def test_types_of_layers_go_before_the_indices_of_those_with_attention(tmp_path: Path) -> None:
    kinds = ["full_attention"] + ["conv"] * 15
    spec = load(tmp_path, LFM2, layer_types=kinds)
    found = [isinstance(layer.mixer, AttentionSpec) for layer in spec.layers]
    assert found == [True] + [False] * 15
    neither = load(tmp_path, LFM2, full_attn_idxs=...)
    assert all(isinstance(layer.mixer, AttentionSpec) for layer in neither.layers)


@pytest.mark.parametrize(
    ("base", "named", "changes"),
    [
        (LFM2, "layer_types: 15 entries for 16 layers", {"layer_types": ["conv"] * 15}),
        (LFM2, "layer_types: 'sliding_attention'", {"layer_types": ["sliding_attention"] * 16}),
        (LFM2, "full_attn_idxs: 3 is no list", {"full_attn_idxs": 3}),
        (LFM2, "conv_L_cache is 0", {"conv_L_cache": 0}),
        (LFM2, "block_use_swiglu", {"block_use_swiglu": False}),
        (LFM2, "sliding_window", {"sliding_window": 64}),
        (LFM2, "a_key_of_tomorrow", {"a_key_of_tomorrow": 1}),
        (LFM2_MOE, "num_experts_per_tok: 33 of 32", {"num_experts_per_tok": 33}),
        (LFM2_MOE, "num_dense_layers: -1", {"num_dense_layers": -1}),
        (LFM2_MOE, "n_group", {"n_group": 2}),
        (LFM2_MOE, "layer_types is missing", {"layer_types": ...}),
    ],
)
def test_what_is_not_served_is_refused_by_name(
    tmp_path: Path, base: dict[str, Any], named: str, changes: dict[str, Any]
) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        load(tmp_path, base, **changes)
