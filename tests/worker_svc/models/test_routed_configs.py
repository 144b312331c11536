"""Configurations of families with sigmoid routers, of gpt-oss, and what is computed by them."""

import re
from pathlib import Path

import pytest
import torch
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from kernels import reference
from kernels.expert_clamp import Clamp
from tests.worker_svc.models.configs import feed_of, read, windows
from worker_svc.config import UnsupportedOption, WorkerConfig
from worker_svc.models import config as model_config
from worker_svc.models.rope import RotaryConfig, YarnScaling
from worker_svc.models.sharding import Sharding
from worker_svc.models.spec import LatentSpec, MoeSpec, RouterSpec, UnsupportedModel
from worker_svc.startup import draft_model
from worker_svc.startup.description import facts_of
from worker_svc.startup.early_sizing import bytes_of_a_block
from worker_svc.startup.implementation import check_states


def test_glm_is_read_and_its_drafting_layer_is_not(tmp_path: Path) -> None:
    spec = read(tmp_path, "glm-4.5-air")
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
    assert read(tmp_path, "glm-4.5-air", num_nextn_predict_layers=0).other_parts == ""
    assert read(tmp_path, "glm-4.5-air", use_qk_norm=True).attention.qk_norm


def test_minimax_is_read(tmp_path: Path) -> None:
    spec = read(tmp_path, "minimax-m2")
    assert list(spec.ropes.values()) == [RotaryConfig(5e6, part=0.5)]
    assert spec.attention.norms_all_heads
    assert feed_of(spec) == MoeSpec(
        RouterSpec(256, 8, renormalizes=True, is_sigmoid=True, has_bias=True), 1536
    )


def test_latents_are_read_and_all_that_the_cache_holds(tmp_path: Path) -> None:
    spec = read(tmp_path, "deepseek-v3")
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
    flash = read(tmp_path, "glm-4.7-flash")
    assert flash.attention.latent == LatentSpec(512, 64, 192, 256, 768, is_interleaved=True)
    assert flash.attentions[0].scale == 256**-0.5
    assert re.fullmatch(flash.other_parts, "model.layers.47.enorm.weight")


def test_what_latents_do_not_serve_is_refused_by_name(tmp_path: Path) -> None:
    spec = read(tmp_path, "glm-4.7-flash")
    with pytest.raises(UnsupportedOption, match=r"draft_model: .* holds latents"):
        check_states(WorkerConfig(draft_model="other"), spec, torch.bfloat16)
    with pytest.raises(UnsupportedOption, match="kv_cache_dtype: FP8"):
        check_states(WorkerConfig(), spec, torch.float8_e4m3fn)
    check_states(WorkerConfig(), spec, torch.bfloat16)
    facts = facts_of(spec, tmp_path, "", torch.bfloat16, 64)
    with pytest.raises(UnsupportedOption, match=r"draft_model: .* has a cache of latents"):
        draft_model._check(tmp_path, spec, facts)


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


def test_gpt_oss_is_read(tmp_path: Path) -> None:
    spec = read(tmp_path, "gpt-oss-20b")
    router = RouterSpec(32, 4, renormalizes=True, has_logit_bias=True)
    feed = MoeSpec(router, 96, bias=True, clamp=Clamp(7.0, 1.702))
    assert {layer.feed for layer in spec.layers} == {feed}
    mixer = spec.attention
    assert (mixer.has_sinks, mixer.qkv_bias, mixer.o_bias) == (True, True, True)
    assert windows(spec) == [128, None, 128, None]
    assert spec.max_model_len == 131072


def test_what_gpt_oss_leaves_out_is_as_in_transformers(tmp_path: Path) -> None:
    left_out = ("rope_scaling", "rope_theta", "layer_types", "sliding_window", "swiglu_limit")
    others = ("num_local_experts", "num_experts_per_tok", "experts_per_token", "attention_bias")
    spec, whole = (
        read(tmp_path, "gpt-oss-20b", **dict.fromkeys((*left_out, *others), ...)),
        read(tmp_path, "gpt-oss-20b"),
    )
    assert (windows(spec), spec.attention) == (windows(whole), whole.attention)
    (rope,) = spec.ropes.values()
    assert (rope,) == tuple(whole.ropes.values())
    assert isinstance(rope.scaling, YarnScaling) and not rope.scaling.truncate
    feed = spec.layers[0].feed
    assert isinstance(feed, MoeSpec) and feed.clamp == Clamp(7.0, 1.702)
    assert (feed.router.num_experts, feed.router.top_k) == (128, 4)


def test_experts_of_gpt_oss_in_one_tensor_are_not_rounded(tmp_path: Path) -> None:
    read(tmp_path, "gpt-oss-20b")
    with pytest.raises(UnsupportedModel, match=r"^quantization: fp8 .* experts of GptOssForCausal"):
        model_config.load(tmp_path, quantization="fp8")
