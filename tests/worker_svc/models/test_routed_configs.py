"""Configurations of families with sigmoid routers are read; some values are refused by name."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from kernels import reference
from worker_svc.config import UnsupportedOption, WorkerConfig
from worker_svc.models import config as model_config
from worker_svc.models.rope import RotaryConfig
from worker_svc.models.sharding import Sharding
from worker_svc.models.spec import LatentSpec, ModelSpec, MoeSpec, RouterSpec, UnsupportedModel
from worker_svc.startup import draft_model
from worker_svc.startup.description import facts_of
from worker_svc.startup.early_sizing import bytes_of_a_block
from worker_svc.startup.implementation import check_states

# As published: GLM-4.5-Air.
GLM: dict[str, Any] = {
    "architectures": ["Glm4MoeForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": [151329, 151336, 151338],
    "first_k_dense_replace": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 10944,
    "max_position_embeddings": 131072,
    "model_type": "glm4_moe",
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 96,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 46,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "pad_token_id": 151329,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "routed_scaling_factor": 1.0,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.54.0",
    "use_cache": True,
    "use_qk_norm": False,
    "vocab_size": 151552,
}
# As published: MiniMax-M2.
MINIMAX: dict[str, Any] = {
    "architectures": ["MiniMaxM2ForCausalLM"],
    "attention_dropout": 0.0,
    "attn_type_list": [1] * 62,
    "auto_map": {
        "AutoConfig": "configuration_minimax_m2.MiniMaxM2Config",
        "AutoModelForCausalLM": "modeling_minimax_m2.MiniMaxM2ForCausalLM",
    },
    "bos_token_id": None,
    "eos_token_id": None,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "initializer_range": 0.02,
    "intermediate_size": 1536,
    "layernorm_full_attention_beta": 1.0,
    "layernorm_linear_attention_beta": 1.0,
    "layernorm_mlp_beta": 1.0,
    "max_position_embeddings": 196608,
    "mlp_intermediate_size": 8192,
    "model_type": "minimax_m2",
    "mtp_transformer_layers": 1,
    "num_attention_heads": 48,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 62,
    "num_key_value_heads": 8,
    "num_local_experts": 256,
    "num_mtp_modules": 3,
    "output_router_logits": False,
    "qk_norm_type": "per_layer",
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "float8_e4m3fn",
        "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-06,
    "rope_theta": 5000000,
    "rotary_dim": 64,
    "router_aux_loss_coef": 0.001,
    "router_jitter_noise": 0.0,
    "scoring_func": "sigmoid",
    "shared_intermediate_size": 0,
    "shared_moe_mode": "sigmoid",
    "sliding_window": None,
    "tie_word_embeddings": False,
    "transformers_version": "4.46.1",
    "use_cache": True,
    "use_mtp": True,
    "use_qk_norm": True,
    "use_routing_bias": True,
    "vocab_size": 200064,
}
# As published: DeepSeek-V3, without its quantization.
DEEPSEEK: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {
        "AutoConfig": "configuration_deepseek.DeepseekV3Config",
        "AutoModel": "modeling_deepseek.DeepseekV3Model",
        "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
    },
    "aux_loss_alpha": 0.001,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "initializer_range": 0.02,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "pretraining_tp": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.33.1",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 129280,
}
# As published: GLM-4.7-Flash.
FLASH: dict[str, Any] = {
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "dtype": "bfloat16",
    "eos_token_id": [154820, 154827, 154829],
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 10240,
    "kv_lora_rank": 512,
    "max_position_embeddings": 202752,
    "model_type": "glm4_moe_lite",
    "moe_intermediate_size": 1536,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 20,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 47,
    "num_key_value_heads": 20,
    "num_nextn_predict_layers": 1,
    "pad_token_id": 154820,
    "partial_rotary_factor": 1.0,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "routed_scaling_factor": 1.8,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "transformers_version": "5.0.0rc0",
    "v_head_dim": 256,
    "vocab_size": 154880,
}


def load(tmp_path: Path, raw: dict[str, Any], **changes: Any) -> ModelSpec:
    (tmp_path / "config.json").write_text(json.dumps(raw | changes))
    return model_config.load(tmp_path)


def feed_of(spec: ModelSpec) -> MoeSpec:
    """The experts of the last layer."""
    feed = spec.layers[-1].feed
    assert isinstance(feed, MoeSpec)
    return feed


def test_glm_is_read_and_its_drafting_layer_is_not(tmp_path: Path) -> None:
    spec = load(tmp_path, GLM)
    assert list(spec.ropes.values()) == [RotaryConfig(1e6, part=0.5)]
    assert [isinstance(layer.feed, MoeSpec) for layer in spec.layers[:3]] == [False, True, True]
    assert feed_of(spec).router == RouterSpec(
        128, 8, renormalizes=True, is_sigmoid=True, has_bias=True
    )
    assert (spec.attention.qkv_bias, spec.attention.o_bias, spec.attention.qk_norm) == (
        True, False, False,
    )  # fmt: skip
    assert re.fullmatch(spec.other_parts, "model.layers.46.eh_proj.weight")
    assert not re.fullmatch(spec.other_parts, "model.layers.45.mlp.gate.weight")
    assert not re.fullmatch(spec.other_parts, "model.layers.4.mlp.gate.weight")
    assert load(tmp_path, GLM, num_nextn_predict_layers=0).other_parts == ""
    assert load(tmp_path, GLM, use_qk_norm=True).attention.qk_norm


def test_minimax_is_read(tmp_path: Path) -> None:
    spec = load(tmp_path, MINIMAX)
    assert list(spec.ropes.values()) == [RotaryConfig(5e6, part=0.5)]
    assert spec.attention.norms_all_heads
    assert feed_of(spec) == MoeSpec(
        RouterSpec(256, 8, renormalizes=True, is_sigmoid=True, has_bias=True), 1536
    )


def test_latents_are_read_and_all_that_the_cache_holds(tmp_path: Path) -> None:
    spec = load(tmp_path, DEEPSEEK)
    assert feed_of(spec).router == RouterSpec(
        256, 8, renormalizes=True, is_sigmoid=True, has_bias=True, scale=2.5, num_groups=8,
        kept_groups=4,
    )  # fmt: skip
    assert [isinstance(layer.feed, MoeSpec) for layer in spec.layers[2:4]] == [False, True]
    latent = LatentSpec(512, 64, 128, 128, 1536, is_interleaved=True)
    assert (spec.attention.latent, spec.max_model_len) == (latent, 163840)
    # YaRN's factor on scores, 0.1 ln 40 + 1, twice.
    assert spec.attentions[0].scale == pytest.approx(192**-0.5 * 1.3688879**2)
    expanded = 128 * (128 + 64 + 128)  # keys and values of all heads
    assert spec.kv_width == 61 * 576
    assert 71 < 61 * expanded / spec.kv_width < 72
    ranks = Sharding(spec, 3, 8).spec
    assert (ranks.attention.num_heads, ranks.kv_width) == (16, spec.kv_width)
    assert (
        bytes_of_a_block(WorkerConfig(block_size=16), [spec], torch.bfloat16) == 16 * 2 * 61 * 576
    )
    flash = load(tmp_path, FLASH)
    assert flash.attention.latent == LatentSpec(512, 64, 192, 256, 768, is_interleaved=True)
    assert flash.attentions[0].scale == 256**-0.5
    assert re.fullmatch(flash.other_parts, "model.layers.47.enorm.weight")


def test_what_latents_do_not_serve_is_refused_by_name(tmp_path: Path) -> None:
    spec = load(tmp_path, FLASH)
    with pytest.raises(UnsupportedOption, match=r"draft_model: .* holds latents"):
        check_states(WorkerConfig(draft_model="other"), spec, torch.bfloat16)
    with pytest.raises(UnsupportedOption, match="kv_cache_dtype: FP8"):
        check_states(WorkerConfig(), spec, torch.float8_e4m3fn)
    check_states(WorkerConfig(), spec, torch.bfloat16)
    facts = facts_of(spec, tmp_path, "", torch.bfloat16, 64)
    with pytest.raises(UnsupportedOption, match=r"draft_model: .* has a cache of latents"):
        draft_model._check(tmp_path, spec, facts)


@pytest.mark.parametrize(
    ("raw", "changes", "named"),
    [
        (GLM, {"n_group": 3}, "n_group: 3 groups of 128 experts"),
        (GLM, {"n_group": 128}, "n_group: 128 groups of 128 experts"),
        (GLM, {"topk_group": 2}, "topk_group: 2 of 1 groups"),
        (GLM, {"n_group": 32}, "topk_group: 1 groups of 4 have no 8 experts"),
        (GLM, {"num_nextn_predict_layers": -1}, "num_nextn_predict_layers: -1"),
        (GLM, {"first_k_dense_replace": "one"}, "first_k_dense_replace: 'one'"),
        (GLM, {"partial_rotary_factor": 0.008}, "partial_rotary_factor: 1 dim"),
        (DEEPSEEK, {"topk_method": "greedy"}, "topk_method: 'greedy'"),
        (DEEPSEEK, {"scoring_func": "softmax"}, "scoring_func: 'softmax'"),
        (DEEPSEEK, {"moe_layer_freq": 2}, "moe_layer_freq: 2"),
        (DEEPSEEK, {"num_key_value_heads": 8}, "num_key_value_heads: 8"),
        (DEEPSEEK, {"head_dim": 192}, "head_dim: 192"),
        (DEEPSEEK, {"qk_rope_head_dim": 63}, "qk_rope_head_dim: 63"),
        (DEEPSEEK, {"quantization_config": MINIMAX["quantization_config"]}, "quantization: "),
        (DEEPSEEK, {"index_topk": 2048}, "index_topk: this key"),
        (FLASH, {"mlp_layer_types": ["sparse"] * 46 + ["dense"]}, "mlp_layer_types: only"),
        (FLASH, {"mlp_layer_types": ["dense"] * 47}, "first_k_dense_replace: differs"),
        (FLASH, {"partial_rotary_factor": 0.5}, r"partial_rotary_factor: 0\.5"),
        (MINIMAX, {"attn_type_list": [1] * 61 + [0]}, "attn_type_list: only 1"),
        (MINIMAX, {"use_qk_norm": False}, "use_qk_norm: False"),
        (MINIMAX, {"qk_norm_type": "per_head"}, "qk_norm_type: 'per_head'"),
        (MINIMAX, {"scoring_func": "softmax"}, "scoring_func: 'softmax'"),
        (MINIMAX, {"use_routing_bias": False}, "use_routing_bias: False"),
        (MINIMAX, {"shared_intermediate_size": 64}, "shared_intermediate_size: 64"),
        (MINIMAX, {"layernorm_mlp_beta": 3.5}, r"layernorm_mlp_beta: 3\.5"),
        (MINIMAX, {"rotary_dim": 130}, "rotary_dim: 130 of 128"),
    ],
)
def test_refusals_name_the_key(
    raw: dict[str, Any], changes: dict[str, Any], named: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        load(tmp_path, raw, **changes)


@pytest.mark.parametrize(("groups", "kept"), [(4, 1), (4, 3), (2, 1), (12, 5)])
def test_groups_of_experts_are_those_of_transformers(groups: int, kept: int) -> None:
    torch.manual_seed(groups + kept)
    config = DeepseekV3Config(
        hidden_size=16, n_routed_experts=24, n_group=groups, topk_group=kept, num_experts_per_tok=5
    )
    theirs = DeepseekV3TopkRouter(config)
    torch.nn.init.normal_(theirs.weight)
    torch.nn.init.normal_(theirs.e_score_correction_bias)
    x = torch.randn(200, 16)
    logits, weights, chosen = theirs(x)
    found, experts = reference.choose_experts(
        logits, 5, True, is_sigmoid=True, bias=theirs.e_score_correction_bias, scale=2.5,
        groups=(groups, kept),
    )  # fmt: skip
    order, their_order = experts.argsort(-1), chosen.argsort(-1)
    assert torch.equal(experts.gather(-1, order), chosen.gather(-1, their_order))
    torch.testing.assert_close(found.gather(-1, order), weights.gather(-1, their_order))
    alone, _ = reference.choose_experts(logits, 5, True, is_sigmoid=True, scale=2.5)
    assert not torch.allclose(found, alone)


def test_absorbed_products_are_those_of_expanded_keys_and_values() -> None:
    torch.manual_seed(0)
    weights = reference.LatentWeights(torch.randn(3, 5, 7), torch.randn(3, 4, 7))
    q, turned, latents, key = (
        torch.randn(*size) for size in ((6, 3, 5), (6, 3, 2), (9, 7), (9, 2))
    )
    queries = reference.latent_queries(q, turned, weights)
    found = torch.einsum("thd,kd->thk", queries, torch.cat((latents, key), dim=-1))
    keys = torch.einsum("hnr,kr->hkn", weights.keys, latents)
    expected = torch.einsum("thn,hkn->thk", q, keys) + torch.einsum("thp,kp->thk", turned, key)
    torch.testing.assert_close(found, expected)
    shares = found.softmax(-1)
    values = torch.einsum("hvr,kr->hkv", weights.values, latents)
    outputs = reference.latent_outputs(torch.einsum("thk,kr->thr", shares, latents), weights)
    torch.testing.assert_close(outputs, torch.einsum("thk,hkv->thv", shares, values))
