"""Configurations of hybrids: Qwen3-Next, Qwen3.5, Granite, LFM2 and Nemotron-H."""

from pathlib import Path
from typing import Any

import pytest

from tests.worker_svc.models.configs import published, read
from worker_svc.models.rope import RotaryConfig
from worker_svc.models.sharding import Sharding
from worker_svc.models.spec import (
    Activation,
    AttentionSpec,
    DeltaNetSpec,
    LayerSpec,
    Mamba2Spec,
    MlpSpec,
    MoeSpec,
    RouterSpec,
    SharedSpec,
    ShortConvSpec,
    UnsupportedModel,
)

DELTA = DeltaNetSpec(16, 32, 128, 128, 4)


def test_qwen3_next_and_qwen3_5_are_read(tmp_path: Path) -> None:
    following = read(tmp_path, "qwen3-next-80b-a3b")
    router = RouterSpec(512, 10, renormalizes=True)
    feeds = {layer.feed for layer in following.layers}
    assert [(feed.router, feed.shared.count) for feed in feeds if isinstance(feed, MoeSpec)] == [
        (router, 1)
    ]
    spec, moe = read(tmp_path, "qwen3.5-9b"), read(tmp_path, "qwen3.5-35b-a3b")
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


def test_ranks_of_qwen3_5_have_heads_and_a_number_that_does_not_divide_is_refused(
    tmp_path: Path,
) -> None:
    spec = read(tmp_path, "qwen3.5-9b")
    part = Sharding(spec, 1, 4).spec.layers[0].mixer
    assert isinstance(part, DeltaNetSpec)
    assert (part.num_key_heads, part.num_value_heads) == (4, 8)
    assert sum(part.sections) * 4 == sum(DELTA.sections)
    odd = read(tmp_path, "qwen3.5-9b", linear_num_key_heads=2)
    with pytest.raises(UnsupportedModel, match="linear_num_key_heads: 2 does not divide"):
        Sharding(odd, 0, 4)


def test_what_qwen3_5_leaves_out_is_as_in_transformers(tmp_path: Path) -> None:
    whole = published("qwen3.5-9b")["text_config"]
    linear = (name for name in whole if name.startswith("linear"))
    left_out = dict.fromkeys(("layer_types", "head_dim", "full_attention_interval", *linear), ...)
    rope = {"rope_theta": 10000000, "rope_type": "default"}
    less = read(tmp_path, "qwen3.5-9b", **left_out, rope_parameters=rope)
    spec = read(tmp_path, "qwen3.5-9b")
    assert (less.layers, less.ropes) == (spec.layers, spec.ropes)


def test_granite_4_is_read(tmp_path: Path) -> None:
    spec = read(tmp_path, "granite-4.0-h-tiny")
    mamba = Mamba2Spec(48, 64, num_groups=1, state_size=128, width=4, norm_eps=1e-5)
    attention = AttentionSpec(12, 4, 128, rope=None, scale=0.0078125)
    expected = [attention if index in (5, 15, 25, 35) else mamba for index in range(40)]
    assert [layer.mixer for layer in spec.layers] == expected
    feed = MoeSpec(RouterSpec(64, 6, renormalizes=True), 512, SharedSpec(2, is_gated=False))
    assert {layer.feed for layer in spec.layers} == {feed}
    assert (spec.embedding_scale, spec.residual_scale, spec.logit_divisor) == (12.0, 0.22, 6.0)


def test_granite_3_is_read(tmp_path: Path) -> None:
    spec = read(tmp_path, "granite-3.3-8b")
    assert spec.attention == AttentionSpec(32, 8, 128, rope=None)
    assert {layer.mixer.rope for layer in spec.layers if layer.mixer} == {"rope"}
    assert {layer.mixer.scale for layer in spec.layers if layer.mixer} == {0.0078125}
    assert (spec.embedding_scale, spec.residual_scale, spec.logit_divisor) == (12.0, 0.22, 16.0)


def test_a_granite_without_experts_has_one_mlp_a_layer_and_may_rotate(tmp_path: Path) -> None:
    changes = {"num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 8192}
    spec = read(tmp_path, "granite-4.0-h-tiny", **changes, position_embedding_type="rope")
    assert {layer.feed for layer in spec.layers} == {MlpSpec(8192)}
    assert {attention.rope for attention in spec.attentions} == {"rope"}


def test_ranks_do_not_divide_granite_4(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"^tensor_parallel_size: 2 ranks .* gate and up"):
        Sharding(read(tmp_path, "granite-4.0-h-tiny"), 0, 2)


def test_lfm2_is_read(tmp_path: Path) -> None:
    spec = read(tmp_path, "lfm2.5-1.2b")
    attention = AttentionSpec(32, 8, 64, "rope", qk_norm=True)
    conv = ShortConvSpec(2048, 3)
    assert [layer.mixer for layer in spec.layers] == [
        attention if index in (2, 5, 8, 10, 12, 14) else conv for index in range(16)
    ]
    assert {layer.feed for layer in spec.layers} == {MlpSpec(8192)}
    assert (spec.rms_norm_eps, spec.tie_word_embeddings) == (1e-5, True)
    assert {rope.theta for rope in spec.ropes.values()} == {1e6}


def test_lfm2_with_experts_is_read(tmp_path: Path) -> None:
    spec = read(tmp_path, "lfm2-8b-a1b")
    router = RouterSpec(
        32, 4, renormalizes=True, is_sigmoid=True, has_bias=True, scale=1.0, epsilon=1e-6
    )
    feeds = [layer.feed for layer in spec.layers]
    assert feeds == [MlpSpec(7168)] * 2 + [MoeSpec(router, 1792)] * 22
    kinds = [isinstance(layer.mixer, ShortConvSpec) for layer in spec.layers]
    assert kinds == [index not in (2, 6, 10, 14, 18, 21) for index in range(24)]


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
def test_the_size_of_an_mlp_of_lfm2_is_adjusted_as_in_transformers(
    tmp_path: Path, changes: dict[str, Any], size: int
) -> None:
    assert {layer.feed for layer in read(tmp_path, "lfm2.5-1.2b", **changes).layers} == {
        MlpSpec(size)
    }


def test_types_of_layers_go_before_the_indices_of_those_with_attention(tmp_path: Path) -> None:
    kinds = ["full_attention"] + ["conv"] * 15
    spec = read(tmp_path, "lfm2.5-1.2b", layer_types=kinds)
    found = [isinstance(layer.mixer, AttentionSpec) for layer in spec.layers]
    assert found == [True] + [False] * 15
    neither = read(tmp_path, "lfm2.5-1.2b", full_attn_idxs=...)
    assert all(isinstance(layer.mixer, AttentionSpec) for layer in neither.layers)


NEMOTRON_MAMBA = Mamba2Spec(64, 64, num_groups=8, state_size=128, width=4, norm_eps=1e-5)
NEMOTRON_ATTENTION = AttentionSpec(32, 2, 128, rope=None)
NEMOTRON_EXPERTS = MoeSpec(
    RouterSpec(128, 6, renormalizes=True, is_sigmoid=True, has_bias=True, scale=2.5),
    1856,
    SharedSpec(2, is_gated=False),
    activation=Activation.RELU2,
)


def test_nemotron_h_is_read(tmp_path: Path) -> None:
    spec = read(tmp_path, "nemotron-3-nano-30b-a3b")
    pattern = published("nemotron-3-nano-30b-a3b")["hybrid_override_pattern"]
    of_letters = {
        "M": LayerSpec(NEMOTRON_MAMBA, None),
        "*": LayerSpec(NEMOTRON_ATTENTION, None),
        "E": LayerSpec(None, NEMOTRON_EXPERTS),
    }
    assert list(spec.layers) == [of_letters[letter] for letter in pattern]
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
def test_layers_of_nemotron_h_are_listed_in_four_ways(
    tmp_path: Path, kinds: dict[str, Any]
) -> None:
    spec = read(
        tmp_path,
        "nemotron-3-nano-30b-a3b",
        **{"hybrid_override_pattern": ..., "num_hidden_layers": ...} | kinds,
    )
    mlp = MlpSpec(1856, activation=Activation.RELU2)
    assert spec.layers == (
        LayerSpec(NEMOTRON_MAMBA, None),
        LayerSpec(None, mlp),
        LayerSpec(NEMOTRON_ATTENTION, None),
    )
