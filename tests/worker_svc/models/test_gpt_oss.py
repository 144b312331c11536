"""gpt-oss: what its config.json says, and what is refused of it by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from kernels.expert_clamp import Clamp
from tests.worker_svc.models.test_config import LLAMA
from worker_svc.models import config as model_config
from worker_svc.models.rope import YarnScaling
from worker_svc.models.spec import ModelSpec, MoeSpec, RouterSpec, UnsupportedModel

KINDS = ["sliding_attention", "full_attention"] * 2
# As published for 20b, without the sizes.
GPT_OSS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "initial_context_length": 4096,
    "intermediate_size": 96,
    "layer_types": KINDS,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_experts_per_tok": 4,
    "num_hidden_layers": 4,
    "num_local_experts": 32,
    "output_router_logits": False,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
}


def load(tmp_path: Path, quantization: str = "auto", **changes: Any) -> ModelSpec:
    raw = {name: value for name, value in (LLAMA | GPT_OSS | changes).items() if value is not ...}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    return model_config.load(tmp_path, quantization=quantization)


def windows(spec: ModelSpec) -> list[int | None]:
    """The window of each layer."""
    return [layer.mixer.window for layer in spec.layers]


def test_the_published_configuration_is_read(tmp_path: Path) -> None:
    spec = load(tmp_path)
    router = RouterSpec(32, 4, renormalizes=True, has_logit_bias=True)
    feed = MoeSpec(router, 96, bias=True, clamp=Clamp(7.0, 1.702))
    assert {layer.feed for layer in spec.layers} == {feed}
    mixer = spec.attention
    assert (mixer.has_sinks, mixer.qkv_bias, mixer.o_bias) == (True, True, True)
    assert windows(spec) == [128, None, 128, None]
    assert spec.max_model_len == 131072


def test_what_a_config_leaves_out_is_as_in_transformers(tmp_path: Path) -> None:
    left_out = ("rope_scaling", "rope_theta", "layer_types", "sliding_window", "swiglu_limit")
    others = ("num_local_experts", "num_experts_per_tok", "experts_per_token", "attention_bias")
    spec, whole = load(tmp_path, **dict.fromkeys((*left_out, *others), ...)), load(tmp_path)
    assert (windows(spec), spec.attention) == (windows(whole), whole.attention)
    (rope,) = spec.ropes.values()
    assert (rope,) == tuple(whole.ropes.values())
    assert isinstance(rope.scaling, YarnScaling) and not rope.scaling.truncate
    feed = spec.layers[0].feed
    assert isinstance(feed, MoeSpec) and feed.clamp == Clamp(7.0, 1.702)
    assert (feed.router.num_experts, feed.router.top_k) == (128, 4)


@pytest.mark.parametrize(
    ("named", "changes"),
    [
        ("experts_per_token: differs from num_experts_per_tok", {"experts_per_token": 2}),
        ("num_experts_per_tok: 33 of 32", {"num_experts_per_tok": 33, "experts_per_token": ...}),
        ("swiglu_limit: 0 is no number above 0", {"swiglu_limit": 0}),
        ("swiglu_alpha: 'soft' is no number", {"swiglu_alpha": "soft"}),
        ("layer_types: 'sliding_attention' without", {"sliding_window": None}),
        ("layer_types: 4 entries for 3 layers", {"num_hidden_layers": 3}),
        ("layer_types: 'linear_attention'", {"layer_types": ["linear_attention"] * 4}),
        ("hidden_act", {"hidden_act": "gelu"}),
        ("mlp_bias", {"mlp_bias": True}),
        ("logit_scale", {"logit_scale": 0.5}),
        ("attn_logit_softcapping", {"attn_logit_softcapping": 50.0}),
        ("norm_topk_prob", {"norm_topk_prob": True}),
        ("a_key_of_tomorrow", {"a_key_of_tomorrow": 1}),
    ],
)
def test_what_is_not_served_is_refused_by_name(
    tmp_path: Path, named: str, changes: dict[str, Any]
) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        load(tmp_path, **changes)


def test_experts_in_one_tensor_are_not_rounded(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"^quantization: fp8 .* experts of GptOssForCausal"):
        load(tmp_path, "fp8")
