"""Keys of config.json: each one is read, known to change nothing, or refused by its name."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from tests.worker_svc.models.configs import LLAMA, changed
from worker_svc.models import config as model_config
from worker_svc.models import config_keys
from worker_svc.models.registry import BUILT_IN, find
from worker_svc.models.spec import ModelSpec, UnsupportedModel

# Published configurations, with the sizes left out.
SMOLLM2 = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.041666666666666664,
    "is_llama_config": True,
    "mlp_bias": False,
    "model_type": "llama",
    "pretraining_tp": 1,
    "rope_interleaved": False,
    "tie_word_embeddings": True,
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
    "transformers_version": "4.42.3",
    "use_cache": True,
}
LLAMA_3_2 = {
    "_commit_hash": "4e20de3",
    "_name_or_path": "meta-llama/Llama-3.2-1B-Instruct",
    "bos_token_id": 128000,
    "head_dim": 64,
    "pretraining_tp": 1,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}
R1_DISTILL_QWEN = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "max_window_layers": 28,
    "sliding_window": 4096,
    "use_mrope": False,
    "use_sliding_window": False,
}
# Those of windows by default, softcaps, factors, another activation and layers of other kinds have
# tests of their own (test_gemma, test_hybrid_configs, test_routed_configs), and so have latents.
UNUSUAL = ("DeepseekV3", "Gemma", "Glm4MoeLite", "GptOss", "Granite", "NemotronH")
USUAL = [name for name in BUILT_IN if not name.startswith(UNUSUAL)]
WITHOUT_EXPERTS = [name for name in USUAL if "num_experts_per_tok" not in find(name).keys]


# Keys without which a family has no model, or another one than the rest.
NEEDED: dict[str, dict[str, Any]] = {
    "Glm4MoeForCausalLM": {"head_dim": 128},
    "Dots1ForCausalLM": {
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "sliding_window": None,
    },
    "GraniteMoeHybridForCausalLM": {
        "layer_types": ["mamba", "attention", "mamba"],
        "num_hidden_layers": 3,
        "shared_intermediate_size": 11008,
    },
    "Lfm2MoeForCausalLM": {
        "layer_types": ["conv", "full_attention", "conv"],
        "num_hidden_layers": 3,
    },
    # One of the three layers here has attention.
    "Qwen3NextForCausalLM": {"full_attention_interval": 3},
    "Qwen3_5ForCausalLM": {"full_attention_interval": 3},
    "Qwen3_5MoeForCausalLM": {"full_attention_interval": 3},
}


def load(tmp_path: Path, *ignored: str, **changes: Any) -> ModelSpec:
    (architecture,) = changes.get("architectures") or LLAMA["architectures"]
    raw = changed(LLAMA, **NEEDED.get(architecture, {}) | changes)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    return model_config.load(tmp_path, ignored)


def defaults(architecture: str, folder: Path) -> dict[str, Any]:
    """Every key that transformers gives a model of this architecture, and what it saves."""
    model_type = find(architecture).model_type
    needed = NEEDED.get(architecture, {})
    made = AutoConfig.for_model(
        model_type, architectures=[architecture], dtype="bfloat16", **needed
    )
    made.save_pretrained(folder)
    saved = json.loads((folder / "config.json").read_text())
    assert saved.keys() <= made.to_dict().keys()
    return {**made.to_dict(), **saved}


@pytest.mark.parametrize("architecture", BUILT_IN)
def test_what_transformers_saves_by_default_is_served(architecture: str, tmp_path: Path) -> None:
    raw = defaults(architecture, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert model_config.load(tmp_path).architecture == architecture


@pytest.mark.parametrize("architecture", BUILT_IN)
def test_each_key_of_transformers_was_judged(architecture: str, tmp_path: Path) -> None:
    family = find(architecture)
    known = config_keys.READ | family.keys | config_keys.INERT | family.inert
    known |= config_keys.NEUTRAL.keys() | family.neutral.keys()
    assert defaults(architecture, tmp_path).keys() <= known


def test_no_key_is_judged_twice() -> None:
    neutral = config_keys.NEUTRAL.keys()
    assert not config_keys.READ & config_keys.INERT
    assert not (config_keys.READ | config_keys.INERT) & neutral


@pytest.mark.parametrize("architecture", BUILT_IN)
def test_a_family_judges_keys_that_all_others_refuse(architecture: str) -> None:
    family = find(architecture)
    assert family.architecture == architecture
    assert not (family.keys | family.neutral.keys()) & config_keys.READ
    assert not family.keys & family.neutral.keys()


@pytest.mark.parametrize("published", [SMOLLM2, LLAMA_3_2, R1_DISTILL_QWEN])
def test_published_configurations_are_served(tmp_path: Path, published: dict[str, Any]) -> None:
    load(tmp_path, **published).check_length(512)


@pytest.mark.parametrize(
    ("named", "value"),
    [
        ("attn_logit_softcapping", 50.0),
        ("final_logit_softcapping", 30.0),
        ("logit_scale", 0.0625),
        ("embedding_multiplier", 12.0),
        ("residual_multiplier", 0.22),
        ("clip_qkv", 8.0),
        ("layer_types", ["full_attention", "sliding_attention", "full_attention"]),
        ("is_causal", False),
        ("auto_map", {"AutoModelForCausalLM": "modeling_llama.LlamaForCausalLM"}),
        ("dual_chunk_attention_config", {"chunk_size": 262144}),
        ("log_scale", True),
        ("model_type", "cohere"),
        ("repetition_penalty", 1.2),
        ("a_key_of_tomorrow", 1),
        ("a_key_of_tomorrow", False),
    ],
)
@pytest.mark.parametrize("architecture", USUAL)
def test_a_key_that_may_change_the_output_is_refused_by_name(
    tmp_path: Path, architecture: str, named: str, value: object
) -> None:
    with pytest.raises(UnsupportedModel, match=rf"^{named}: "):
        load(tmp_path, architectures=[architecture], **{named: value})


@pytest.mark.parametrize(
    "asks_for_nothing",
    [
        {"attn_logit_softcapping": None, "final_logit_softcapping": None, "clip_qkv": None},
        {"logit_scale": 1.0, "embedding_multiplier": 1, "residual_multiplier": 1.0},
        {"attention_bias": False, "mlp_bias": False, "rope_scaling": None},
        {"sliding_window": None, "use_sliding_window": False, "max_window_layers": 21},
        {"layer_types": ["full_attention"] * 3, "is_causal": True},
        {"quantization_config": None, "auto_map": {}},
        {"a_key_of_tomorrow": None},
    ],
)
@pytest.mark.parametrize("architecture", USUAL)
def test_neutral_values_are_accepted(
    tmp_path: Path, architecture: str, asks_for_nothing: dict[str, Any]
) -> None:
    load(tmp_path, architectures=[architecture], **asks_for_nothing)


@pytest.mark.parametrize("architecture", WITHOUT_EXPERTS)
def test_no_experts_are_asked_for_by_zero(tmp_path: Path, architecture: str) -> None:
    load(tmp_path, architectures=[architecture], num_experts=0, num_local_experts=0)
    with pytest.raises(UnsupportedModel, match=r"^num_experts: 8 is not supported"):
        load(tmp_path, architectures=[architecture], num_experts=8)


def test_a_llama_with_a_sliding_window_is_served_up_to_its_length(tmp_path: Path) -> None:
    config = load(tmp_path, sliding_window=128)
    config.check_length(128)
    with pytest.raises(UnsupportedModel, match=r"^sliding_window: "):
        config.check_length(129)
    load(tmp_path, sliding_window=128, use_sliding_window=False).check_length(512)


def test_two_rotations_that_differ_are_refused(tmp_path: Path) -> None:
    linear = {"type": "linear", "factor": 2.0}
    same = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e5}
    load(tmp_path, rope_scaling=linear, rope_parameters=same)
    with pytest.raises(UnsupportedModel, match=r"^rope_scaling: "):
        load(tmp_path, rope_scaling=linear, rope_parameters={"rope_theta": 1e5})


def test_an_ignored_key_is_let_through_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        load(tmp_path, "a_key_of_tomorrow", "logit_scale", a_key_of_tomorrow=1, logit_scale=0.5)
    assert [line.split(" is ignored")[0] for line in caplog.messages] == [
        "config.json: a_key_of_tomorrow",
        "config.json: logit_scale",
    ]


def test_ignoring_one_key_lets_no_other_through(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"^logit_scale: "):
        load(tmp_path, "a_key_of_tomorrow", a_key_of_tomorrow=1, logit_scale=0.5)


@pytest.mark.parametrize("read", ["hidden_size", "layer_types", "attention_bias"])
def test_a_key_that_is_read_cannot_be_ignored(tmp_path: Path, read: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"^ignore_config_keys: {read} "):
        load(tmp_path, read)


def test_a_file_in_place_of_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.bin").touch()
    with pytest.raises(UnsupportedModel, match=r"^model: .*x\.bin is not a folder"):
        model_config.load(tmp_path / "x.bin")
