"""A model as data: what is derived from its layers, and what is refused of layers that differ."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels.attention_kind import AttentionKind
from worker_svc.config import UnsupportedOption, WorkerConfig
from worker_svc.models import kernel_limits
from worker_svc.models.rope import RotaryConfig, YarnScaling
from worker_svc.models.sharding import Sharding
from worker_svc.models.spec import (
    AttentionSpec,
    LayerSpec,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    RouterSpec,
    TensorNames,
    UnsupportedModel,
    rehearsed,
)
from worker_svc.startup.implementation import check_states

ATTENTION = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=8, rope="rope")
ROUTER = RouterSpec(4, 2, renormalizes=True)
LAYER = LayerSpec(ATTENTION, MlpSpec(24))
MODEL = ModelSpec(
    architecture="LlamaForCausalLM",
    vocab_size=32,
    hidden_size=16,
    layers=(LAYER, LAYER, LAYER),
    ropes={"rope": RotaryConfig(10_000.0)},
    rms_norm_eps=1e-5,
    max_position_embeddings=64,
    tie_word_embeddings=False,
)


def with_second(**changes: object) -> ModelSpec:
    """The model with another attention in its second layer."""
    other = replace(LAYER, mixer=replace(ATTENTION, **changes))  # type: ignore[arg-type]
    return replace(MODEL, layers=(LAYER, other, LAYER))


def test_layers_that_rotate_differently_have_one_shape() -> None:
    shape = replace(LAYER, mixer=replace(ATTENTION, rope=None))
    assert MODEL.uniform == with_second(rope=None).uniform == shape


@pytest.mark.parametrize(
    "changes", [{"num_heads": 8}, {"head_dim": 16}, {"qkv_bias": True}, {"qk_norm": True}]
)
def test_layers_of_several_shapes_are_refused_where_one_is_needed(
    changes: dict[str, object],
) -> None:
    model = with_second(**changes)
    with pytest.raises(UnsupportedModel, match=r"^layers: LlamaForCausalLM has layers of 2 kinds"):
        _ = model.uniform
    with pytest.raises(UnsupportedModel, match=r"^layers: .* has attention of 2 kinds"):
        _ = model.attention


def test_what_needs_heads_of_one_size_is_not_computed_by_kernels_of_one_shape() -> None:
    other = with_second(head_dim=16)
    assert (MODEL.has_one_attention, with_second(window=4).has_one_attention) == (True, True)
    assert not other.has_one_attention
    several = "attention of several shapes"
    assert [kernel_limits.beyond_c(spec) for spec in (MODEL, other)] == ["", several]
    assert [kernel_limits.beyond_triton(spec, 2) for spec in (MODEL, other)] == ["", several]
    assert other.kv_width == 2 * 2 * (8 + 16 + 8)


def test_keys_and_values_are_divided_by_the_heads_of_their_own_layer() -> None:
    """Two of four ranks have the same one of two KV heads; each has its own of four."""
    sharding = Sharding(with_second(num_kv_heads=4), 3, 4)
    for layer, expected in ((0, (1, 2)), (1, (3, 4)), (2, (1, 2))):
        share = sharding.share(f"model.layers.{layer}.self_attn.k_proj.weight")
        assert share is not None
        assert (share.index, share.count) == expected


@pytest.mark.parametrize("option", [{"draft_model": "other"}, {}])
def test_options_that_need_one_size_of_heads_are_refused_by_name(option: dict[str, Any]) -> None:
    """A cache in FP8 is the second."""
    named, kv_dtype = next(iter(option), "kv_cache_dtype"), torch.bfloat16
    if not option:
        kv_dtype = torch.float8_e4m3fn
    check_states(WorkerConfig(**option), MODEL, kv_dtype)
    with pytest.raises(UnsupportedOption, match=f"^{named}: .*LlamaForCausalLM"):
        check_states(WorkerConfig(**option), with_second(head_dim=16), kv_dtype)


def test_layers_that_are_fed_differently_share_their_attention() -> None:
    experts = replace(LAYER, feed=MoeSpec(ROUTER, 12))
    model = replace(MODEL, layers=(LAYER, experts, experts, experts))
    assert model.attention == replace(ATTENTION, rope=None)
    assert (MODEL.has_experts, model.has_experts) == (False, True)
    with pytest.raises(UnsupportedModel, match=r"has layers of 2 kinds"):
        _ = model.uniform
    assert model.rehearsed().layers == (LAYER, experts, experts)


def test_ranks_divide_each_expert() -> None:
    experts = replace(LAYER, feed=MoeSpec(ROUTER, 12))
    model = replace(MODEL, layers=(LAYER, experts))
    part = Sharding(model, 1, 4).spec.layers
    assert [part[0].feed, part[1].feed] == [MlpSpec(6), MoeSpec(ROUTER, 3)]
    odd = replace(LAYER, feed=MoeSpec(ROUTER, 10))
    with pytest.raises(UnsupportedModel, match="intermediate_size of an expert: 10 does not"):
        Sharding(replace(MODEL, layers=(odd,)), 0, 4)


def test_layers_that_see_differently_have_one_shape_and_a_kind_each() -> None:
    model = with_second(window=8, scale=0.5, softcap=30.0)
    assert model.uniform == MODEL.uniform
    full, other, _ = (layer.mixer.kind(64) for layer in model.layers)
    assert full == AttentionKind(ATTENTION.heads.scale)
    assert other == AttentionKind(0.5, window=8, softcap=30.0)


def test_a_window_as_long_as_contexts_are_is_none() -> None:
    mixer = with_second(window=8).layers[1].mixer
    assert mixer.kind(9).window == 8
    assert mixer.kind(8).is_plain


def test_a_window_that_no_layer_applies_limits_the_length() -> None:
    model = replace(MODEL, unsure_window=8)
    model.check_length(8)
    with pytest.raises(UnsupportedModel, match=r"^sliding_window: .* last 8 tokens .* \(now 9\)"):
        model.check_length(9)
    with_second(window=8).check_length(9)


def test_the_rotation_that_reaches_farthest_limits_the_length() -> None:
    yarn = RotaryConfig(10_000.0, YarnScaling(4.0, 64))
    model = replace(MODEL, ropes=MODEL.ropes | {"far": yarn})  # type: ignore[operator]
    assert (MODEL.max_model_len, model.max_model_len) == (64, 256)


def test_a_head_is_called_so_that_quantization_knows_it() -> None:
    assert TensorNames(head="language_model.lm_head").head_weight == "language_model.lm_head.weight"
    with pytest.raises(ValueError, match=r"^head: model\.output does not end in lm_head"):
        TensorNames(head="model.output")


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ("a", [0]),
        ("aaaa", [0, 1]),
        ("abbb", [0, 1, 2]),
        ("ab", [0, 1]),
        ("aaba", [0, 2, 3]),
        ("abab", [0, 1, 3]),
    ],
)
def test_a_rehearsal_has_each_kind_and_then_the_last(kinds: str, expected: list[int]) -> None:
    assert rehearsed(kinds) == expected


def test_ranks_divide_each_layer() -> None:
    model = with_second(rope=None)
    part = Sharding(model, 1, 4).spec
    assert [layer.mixer.rope for layer in part.layers] == ["rope", None, "rope"]
    assert {layer.unrotated for layer in part.layers} == {
        LayerSpec(AttentionSpec(1, 1, 8, rope=None), MlpSpec(6))
    }
    assert (part.vocab_size, part.hidden_size) == (8, 16)
