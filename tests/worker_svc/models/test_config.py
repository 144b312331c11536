"""config.json in the formats of transformers 4 and 5, and each refused setting."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen2Config

from tests.worker_svc.models.configs import SLIDING, read, windows
from worker_svc.models import config as model_config
from worker_svc.models.rope import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RotaryConfig,
    YarnScaling,
)
from worker_svc.models.spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, UnsupportedModel

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

QWEN_WINDOWS = {
    "architectures": ["Qwen2ForCausalLM"],
    "sliding_window": 16,
    "use_sliding_window": True,
}
LONG_ROPE: dict[str, Any] = {
    "rope_type": "longrope", "short_factor": [1] * 4, "long_factor": [2] * 4,
}  # fmt: skip


def load(tmp_path: Path, generation: dict[str, Any] | None = None, **changes: Any) -> Any:
    """Loads a Llama with changes; the value `...` removes a field."""
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    return read(tmp_path, "llama", **changes)


def rotations(spec: ModelSpec) -> list[RotaryConfig]:
    """The rotation of each layer."""
    return [spec.ropes[layer.mixer.rope] for layer in spec.layers]


def test_a_config_of_transformers_4_is_read(tmp_path: Path) -> None:
    config = load(tmp_path)
    assert config.architecture == "LlamaForCausalLM"
    assert config.num_layers == 3
    assert config.uniform == LayerSpec(AttentionSpec(8, 2, 8, rope=None), MlpSpec(96))
    assert rotations(config) == [RotaryConfig(theta=1e5)] * 3
    assert config.checkpoint_dtype == "bfloat16"
    assert not config.tie_word_embeddings


def test_a_config_of_transformers_5_means_the_same(tmp_path: Path) -> None:
    old = load(tmp_path)
    new = load(
        tmp_path,
        torch_dtype=...,
        rope_theta=...,
        rope_scaling=...,
        dtype="bfloat16",
        rope_parameters={"rope_type": "default", "rope_theta": 1e5},
    )
    assert new == old


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        ({"type": "linear", "factor": 2.0}, LinearScaling(2.0)),
        ({"rope_type": "llama3", **LLAMA3}, Llama3Scaling(**LLAMA3)),
        (
            {"type": "yarn", "rope_type": "yarn", "factor": 4.0, "beta_fast": 16},
            YarnScaling(4.0, 512, beta_fast=16),
        ),
        ({"rope_type": "default"}, None),
        ({"type": "dynamic", "factor": 2.0}, DynamicScaling(2.0)),
        (LONG_ROPE, LongRopeScaling((1, 1, 1, 1), (2, 2, 2, 2), 512, 1.0)),
        (
            LONG_ROPE | {"original_max_position_embeddings": 128},
            LongRopeScaling((1, 1, 1, 1), (2, 2, 2, 2), 128, 4.0),
        ),
    ],
)
def test_rope_scaling_is_read_in_both_places(
    tmp_path: Path, scaling: dict[str, Any], expected: object
) -> None:
    assert rotations(load(tmp_path, rope_scaling=scaling)) == [RotaryConfig(1e5, expected)] * 3
    there = {"rope_theta": 1e5, **scaling}
    config = load(tmp_path, rope_theta=..., rope_scaling=..., rope_parameters=there)
    assert rotations(config) == [RotaryConfig(1e5, expected)] * 3


@pytest.mark.parametrize("kind", [{"rope_type": "yarn", "factor": 2.0}, LONG_ROPE])
def test_the_original_length_may_stand_beside_the_scaling_and_goes_before_its_own(
    tmp_path: Path, kind: dict[str, Any]
) -> None:
    own = kind | {"original_max_position_embeddings": 256}
    config = load(tmp_path, rope_scaling=own, original_max_position_embeddings=128)
    scalings = {rotation.scaling.original_max_position_embeddings for rotation in rotations(config)}
    assert scalings == {128}


def test_head_dim_may_be_null_or_unlike_the_hidden_size(tmp_path: Path) -> None:
    assert load(tmp_path, head_dim=None).uniform.mixer.head_dim == 8
    assert load(tmp_path, head_dim=128).uniform.mixer.head_dim == 128


def test_num_key_value_heads_defaults_to_all_heads(tmp_path: Path) -> None:
    assert load(tmp_path, num_key_value_heads=...).uniform.mixer.num_kv_heads == 8


@pytest.mark.parametrize(
    ("architecture", "changes", "biases", "qk_norm"),
    [
        ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}, (1, 1, 1), False),
        ("MistralForCausalLM", {"sliding_window": None}, (0, 0, 0), False),
        ("Qwen2ForCausalLM", {}, (1, 0, 0), False),
        ("Qwen3ForCausalLM", {}, (0, 0, 0), True),
        ("Qwen3ForCausalLM", {"attention_bias": True}, (1, 1, 0), True),
    ],
)
def test_each_family_has_its_own_biases_and_norms(
    tmp_path: Path,
    architecture: str,
    changes: dict[str, Any],
    biases: tuple[int, int, int],
    qk_norm: bool,
) -> None:
    layer = load(tmp_path, architectures=[architecture], **changes).uniform
    assert (layer.mixer.qkv_bias, layer.mixer.o_bias, layer.feed.bias) == biases
    assert layer.mixer.qk_norm == qk_norm


@pytest.mark.parametrize(
    ("in_config", "in_generation", "expected"),
    [
        (7, None, (7,)),
        ([7, 8], None, (7, 8)),
        (7, {"eos_token_id": [8, 9]}, (8, 9)),
        (7, {"temperature": 0.6}, (7,)),
        (..., None, ()),
        (0, {"eos_token_id": 0}, (0,)),
    ],
)
def test_end_of_sequence_ids_come_from_the_generation_config_first(
    tmp_path: Path, in_config: Any, in_generation: Any, expected: tuple[int, ...]
) -> None:
    assert load(tmp_path, in_generation, eos_token_id=in_config).eos_token_ids == expected


@pytest.mark.parametrize(
    ("in_generation", "expected", "told"),
    [
        ([8, 100], (8,), "[100]"),  # of a vocabulary of 100
        ([8, 2**70, -1, 99], (8, 99), "[1180591620717411303424, -1]"),
        ([8, "9", 9.0, True, None, [9]], (8,), "['9', 9.0, True, None, [9]]"),
        ([8, 8, 9], (8, 9), ""),
        (100, (7,), "[100]"),  # config.json has another
        (-1, (7,), "[-1]"),
        ("8", (7,), "['8']"),
        ([], (), ""),
    ],
)
def test_an_end_of_sequence_id_outside_the_vocabulary_is_dropped_with_a_warning(
    tmp_path: Path,
    in_generation: Any,
    expected: tuple[int, ...],
    told: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = load(tmp_path, {"eos_token_id": in_generation})
    assert config.eos_token_ids == expected
    warned = f"generation_config.json: eos_token_id: {told}: no ids of the vocabulary"
    assert (warned in caplog.text) == bool(told)


def test_a_model_whose_ends_are_all_outside_its_vocabulary_has_none(tmp_path: Path) -> None:
    assert load(tmp_path, {"eos_token_id": [100, 101]}, eos_token_id=102).eos_token_ids == ()


def test_an_unknown_architecture_is_told_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"LlamaForCausalLM, .*Qwen3ForCausalLM"):
        load(tmp_path, architectures=["BloomForCausalLM"])


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_a_folder_without_a_readable_config_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(UnsupportedModel, match=r"config\.json"):
        model_config.load(tmp_path)


@pytest.mark.parametrize("window", [{"sliding_window": 128}, {"sliding_window": 128.0}, {}])
def test_a_mistrals_window_is_that_of_all_layers(tmp_path: Path, window: dict[str, Any]) -> None:
    config = load(tmp_path, architectures=["MistralForCausalLM"], **window)
    assert windows(config) == [window.get("sliding_window", 4096)] * 3
    config.check_length(512)


def test_a_mistral_whose_config_contradicts_itself_is_served_up_to_its_window(
    tmp_path: Path,
) -> None:
    """transformers' class gives all layers a window, whatever `layer_types` says."""
    kinds = {"layer_types": ["full_attention"] * 3, "sliding_window": 128}
    config = load(tmp_path, architectures=["MistralForCausalLM"], **kinds)
    assert windows(config) == [None] * 3
    config.check_length(128)
    with pytest.raises(UnsupportedModel, match="sliding_window"):
        config.check_length(129)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [None] * 3),  # the first 28 layers are full
        ({"max_window_layers": 1}, [None, 16, 16]),
        ({"max_window_layers": 0}, [16, 16, 16]),
        ({"sliding_window": None, "max_window_layers": 0}, [None] * 3),
        ({"sliding_window": ..., "max_window_layers": 2}, [None, None, 4096]),
        ({"layer_types": [SLIDING, "full_attention", SLIDING]}, [16, None, 16]),
        ({"layer_types": ["full_attention"] * 3, "max_window_layers": 0}, [None] * 3),
    ],
)
@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_the_windows_of_qwen_are_those_of_transformers(
    tmp_path: Path, architecture: str, changes: dict[str, Any], expected: list[int | None]
) -> None:
    given = QWEN_WINDOWS | {"architectures": [architecture]} | changes
    assert windows(load(tmp_path, **given)) == expected
    raw = json.loads((tmp_path / "config.json").read_text()) | {"model_type": ...}
    theirs = Qwen2Config(**{name: value for name, value in raw.items() if value is not ...})
    assert expected == [
        theirs.sliding_window if kind == SLIDING else None for kind in theirs.layer_types
    ]


def test_qwen_keeps_a_window_size_that_it_does_not_use(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        architectures=["Qwen2ForCausalLM"],
        sliding_window=16,
        use_sliding_window=False,
    )
    config.check_length(512)


@pytest.mark.parametrize("length", [0, 513])
def test_lengths_beyond_the_model_are_refused_with_its_limit(tmp_path: Path, length: int) -> None:
    config = load(tmp_path)
    config.check_length(512)
    with pytest.raises(UnsupportedModel, match=r"1\.\.512"):
        config.check_length(length)


def test_yarn_extends_the_models_limit(tmp_path: Path) -> None:
    config = load(tmp_path, rope_scaling={"type": "yarn", "factor": 4.0})
    assert config.max_model_len == 2048
