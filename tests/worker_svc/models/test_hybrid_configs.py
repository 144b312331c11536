"""Configurations of Qwen3-Next and Qwen3.5 are read, and what is not served refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.worker_svc.transformers_models.families import FULL, LINEAR
from worker_svc.models import config as model_config
from worker_svc.models.rope import RotaryConfig
from worker_svc.models.sharding import Sharding
from worker_svc.models.spec import (
    DeltaNetSpec,
    ModelSpec,
    MoeSpec,
    RouterSpec,
    SharedSpec,
    UnsupportedModel,
)

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
# As published: Qwen3-Next-80B-A3B-Instruct.
NEXT: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 5120,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "model_type": "qwen3_next",
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "output_router_logits": False,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.57.0.dev0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
# As published: Qwen3.5-9B.
TEXT: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_output_gate": True,
    "dtype": "bfloat16",
    "eos_token_id": 248044,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 12288,
    "layer_types": [LINEAR, LINEAR, LINEAR, FULL] * 8,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "model_type": "qwen3_5_text",
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "num_attention_heads": 16,
    "num_hidden_layers": 32,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "rope_type": "default",
    },
    "use_cache": True,
    "vocab_size": 248320,
}
WITH_PICTURES: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "image_token_id": 248056,
    "model_type": "qwen3_5",
    "text_config": TEXT,
    "tie_word_embeddings": False,
    "transformers_version": "4.57.0.dev0",
    "video_token_id": 248057,
    "vision_config": {"depth": 27, "model_type": "qwen3_5"},
    "vision_end_token_id": 248054,
    "vision_start_token_id": 248053,
}
# As published: Qwen3.5-35B-A3B, where it differs.
MOE_TEXT = {name: value for name, value in TEXT.items() if name != "intermediate_size"} | {
    "hidden_size": 2048,
    "layer_types": [LINEAR, LINEAR, LINEAR, FULL] * 10,
    "model_type": "qwen3_5_moe_text",
    "moe_intermediate_size": 512,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 512,
}
MOE = WITH_PICTURES | {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "model_type": "qwen3_5_moe",
    "text_config": MOE_TEXT,
}
DELTA = DeltaNetSpec(16, 32, 128, 128, 4)


def load(tmp_path: Path, raw: dict[str, Any], **changes: Any) -> ModelSpec:
    kept = {name: value for name, value in (raw | changes).items() if value is not ...}
    (tmp_path / "config.json").write_text(json.dumps(kept))
    return model_config.load(tmp_path)


def text(**changes: Any) -> dict[str, Any]:
    return WITH_PICTURES | {"text_config": TEXT | changes}


def test_published_configurations_are_read(tmp_path: Path) -> None:
    following = load(tmp_path, NEXT)
    router = RouterSpec(512, 10, renormalizes=True)
    feeds = {layer.feed for layer in following.layers}
    assert [(feed.router, feed.shared.count) for feed in feeds if isinstance(feed, MoeSpec)] == [
        (router, 1)
    ]
    spec, moe = load(tmp_path, WITH_PICTURES), load(tmp_path, MOE)
    (feed,) = {layer.feed for layer in moe.layers}
    assert isinstance(feed, MoeSpec)
    assert feed.router == RouterSpec(256, 8, renormalizes=True)
    assert (feed.intermediate_size, feed.shared) == (512, SharedSpec(1, is_gated=True))
    for each, is_grouped in ((following, True), (spec, False), (moe, False)):
        deltas = [layer.mixer for layer in each.layers if isinstance(layer.mixer, DeltaNetSpec)]
        assert len(deltas) == 3 * len(each.attentions)
        assert {(delta.sections, delta.is_grouped) for delta in deltas} == {
            (DELTA.sections, is_grouped)
        }
        assert list(each.ropes.values()) == [RotaryConfig(1e7, part=0.25)]
        assert each.attention.is_gated
        assert each.attention.qk_norm
        assert each.max_model_len == 262144


def test_what_a_config_leaves_out_is_as_in_transformers(tmp_path: Path) -> None:
    whole = load(tmp_path, WITH_PICTURES)
    left_out = [
        "layer_types",
        "head_dim",
        "full_attention_interval",
        *(k for k in TEXT if "linear" in k),
    ]
    inner = {name: value for name, value in TEXT.items() if name not in left_out}
    rope = {"rope_theta": 10000000, "rope_type": "default"}
    less = load(tmp_path, WITH_PICTURES | {"text_config": inner | {"rope_parameters": rope}})
    assert (less.layers, less.ropes) == (whole.layers, whole.ropes)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"attn_output_gate": False}, "attn_output_gate: False"),
        ({"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype: 'bfloat16'"),
        ({"attention_bias": True}, "attention_bias: True"),
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu'"),
        ({"layer_types": ["sideways"] * 32}, "layer_types: 'sideways'"),
        ({"layer_types": [LINEAR] * 32}, "layer_types: no layer"),
        ({"layer_types": [FULL] * 3}, "layer_types: 3 entries"),
        ({"linear_num_key_heads": 12}, "linear_num_key_heads: 12 does not divide 32"),
        ({"rope_parameters": {"partial_rotary_factor": 1.5}}, "partial_rotary_factor: 1.5"),
        ({"rope_parameters": {"partial_rotary_factor": 0.004}}, "partial_rotary_factor: 1 dim"),
        ({"delta_gate": 1}, "delta_gate: this key"),
        ({"quantization_config": AWQ}, "awq, 4 bits.* only 8-bit floats are"),
    ],
)
def test_refusals_name_the_key(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        load(tmp_path, text(**changes))


def test_ranks_have_heads_and_a_number_that_does_not_divide_is_refused(tmp_path: Path) -> None:
    spec = load(tmp_path, WITH_PICTURES)
    part = Sharding(spec, 1, 4).spec.layers[0].mixer
    assert isinstance(part, DeltaNetSpec)
    assert (part.num_key_heads, part.num_value_heads) == (4, 8)
    assert sum(part.sections) * 4 == sum(DELTA.sections)
    odd = load(tmp_path, text(linear_num_key_heads=2))
    with pytest.raises(UnsupportedModel, match="linear_num_key_heads: 2 does not divide"):
        Sharding(odd, 0, 4)
