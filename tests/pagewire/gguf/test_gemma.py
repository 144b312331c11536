"""A Gemma in a GGUF file is the folder that transformers makes of it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from pagewire.gguf.architecture import ARCHITECTURES, OUTER
from pagewire.gguf.files import read_file
from pagewire.gguf.header import BadGguf, read_header
from pagewire.gguf.stored import stored_weights
from tests.gguf_files import GgufFile, Packed, packed, sentencepiece_vocabulary, sizes
from worker_svc.models import config as model_config
from worker_svc.models.config import UnsupportedModel

VOCABULARY = sentencepiece_vocabulary(add_space_prefix=False, padding_token_id=0)
CONFIG: dict[str, Any] = {
    "num_hidden_layers": 7,
    "max_position_embeddings": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "vocab_size": len(VOCABULARY["tokenizer.ggml.tokens"]),
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOWS: dict[str, Any] = {"sliding_window": 8, "query_pre_attn_scalar": 16}
ROTATION = {"rope_type": "default", "rope_theta": 1000000.0}
ROTATIONS = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": ROTATION,
}
FAMILIES: dict[str, tuple[type[PretrainedConfig], type[PreTrainedModel], dict[str, Any]]] = {
    "gemma": (GemmaConfig, GemmaForCausalLM, {"rope_parameters": ROTATION}),
    "gemma2": (
        Gemma2Config,
        Gemma2ForCausalLM,
        WINDOWS | {"rope_parameters": ROTATION, "final_logit_softcapping": 20.0},
    ),
    "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM, WINDOWS | {"rope_parameters": ROTATIONS}),
}

Edit = Callable[[GgufFile], None]


def told(key: str, value: Any) -> Edit:
    return lambda file: file.metadata.update({f"gemma3.{key}": value})


def random_model(name: str) -> PreTrainedModel:
    """A model whose norms multiply by what float32 adds to 1 without rounding."""
    torch.manual_seed(0)
    of_config, of_model, more = FAMILIES[name]
    model: PreTrainedModel = of_model(of_config(**CONFIG, **more, initializer_range=0.2)).eval()
    for path, parameter in model.named_parameters():
        if path.endswith("norm.weight"):
            parameter.data = torch.randint(-32, 32, parameter.shape) / 64
    return model


@pytest.fixture(scope="module")
def oracle() -> PreTrainedModel:
    return random_model("gemma3")


def file_of(
    model: PreTrainedModel, edit: Edit = lambda file: None, name: str = "gemma3"
) -> GgufFile:
    """The file of a model, as llama.cpp's converter would write it."""
    metadata = sizes(name, CONFIG | {"rope_theta": 1000000.0}) | VOCABULARY
    file = GgufFile(name, metadata | {"general.name": "tiny"})
    for key, field in (
        ("attention.sliding_window", "sliding_window"),
        ("final_logit_softcapping", "final_logit_softcapping"),
    ):
        if FAMILIES[name][2].get(field) is not None:
            file.metadata[f"{name}.{key}"] = FAMILIES[name][2][field]
    outer = {ours: stored for stored, ours in OUTER.items()}
    inner = {ours: stored for stored, ours in ARCHITECTURES[name].layer_names.items()}
    for path, parameter in model.state_dict().items():
        values = parameter.numpy() + (1 if path.endswith("norm.weight") else 0)
        if path in outer and path != "lm_head.weight":
            file.tensors[outer[path]] = packed(values, "F32")
        elif path not in outer:
            _, _, layer, kind = path.removesuffix(".weight").split(".", 3)
            file.tensors[f"blk.{layer}.{inner[kind]}.weight"] = packed(values, "F32")
    edit(file)
    return file


def config_of(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(read_file(path, "config.json") or b"")
    return content


def differences(ours: dict[str, Any], theirs: dict[str, Any]) -> set[str]:
    return {name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)}


@pytest.mark.parametrize("name", FAMILIES)
def test_configuration_and_weights_are_those_of_the_model(name: str, tmp_path: Path) -> None:
    oracle = random_model(name)
    path = file_of(oracle, name=name).write(tmp_path / "model.gguf")
    of_config, of_model, _ = FAMILIES[name]
    config = of_config(**config_of(path))
    away = {"architectures", "dtype", "initializer_range"}
    assert differences(config.to_dict(), oracle.config.to_dict()) <= away
    stored = stored_weights(read_header(path))
    found = {path: torch.from_numpy(each.dense()) for path, each in stored.items()}
    model = of_model(config).eval()
    assert model.load_state_dict(found, strict=False).missing_keys == ["lm_head.weight"]
    ids = torch.arange(3, 43)[None]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, oracle(ids).logits)
    assert oracle(ids).logits.std() > 0.1  # or equality would say little


@pytest.mark.parametrize("name", ["gemma2", "gemma3"])  # it reads no first generation
def test_transformers_reads_the_same_out_of_the_file(name: str, tmp_path: Path) -> None:
    oracle = random_model(name)
    path = file_of(oracle, name=name).write(tmp_path / "model.gguf")
    theirs = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=oracle)
    expected = theirs["tensors"]
    found = stored_weights(read_header(path))
    assert found.keys() == expected.keys()
    for tensor, stored in found.items():
        assert np.array_equal(stored.dense(), expected[tensor].numpy()), tensor
    of_config = FAMILIES[name][0]
    config = of_config(**theirs["config"]).to_dict()
    ours = of_config(**config_of(path)).to_dict()
    assert config["rms_norm_eps"] == np.float32(ours["rms_norm_eps"])
    same = CONFIG.keys() | {"layer_types", "rope_parameters", "sliding_window"}
    for field in same - {"rms_norm_eps"}:
        assert ours[field] == config[field], field


WINDOW, ALL = "sliding_attention", "full_attention"


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (
            told("attention.sliding_window_pattern", 3),
            {"layer_types": [WINDOW, WINDOW, ALL] * 2 + [WINDOW]},
        ),
        (
            told("attention.sliding_window_pattern", [False, True] * 3 + [True]),
            {"layer_types": [ALL, WINDOW] * 3 + [WINDOW]},
        ),
        (
            lambda file: file.metadata.pop("gemma3.attention.sliding_window"),
            {"layer_types": [ALL] * 7, "sliding_window": None},
        ),
        (told("final_logit_softcapping", 30.0), {"final_logit_softcapping": 30.0}),
        (told("rope.freq_base_swa", 5000.0), {"theta of windows": 5000.0}),
    ],
)
def test_what_a_file_says_of_windows_goes_before_what_is_usual(
    edit: Edit, expected: dict[str, Any], oracle: PreTrainedModel, tmp_path: Path
) -> None:
    config = config_of(file_of(oracle, edit).write(tmp_path / "model.gguf"))
    config["theta of windows"] = config["rope_parameters"][WINDOW]["rope_theta"]
    assert {name: config[name] for name in expected} == expected


def test_a_long_context_stretches_the_layers_without_a_window_alone(
    oracle: PreTrainedModel, tmp_path: Path
) -> None:
    def edit(file: GgufFile) -> None:
        file.metadata |= {"gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0}

    path = file_of(oracle, edit).write(tmp_path / "model.gguf")
    assert config_of(path)["rope_parameters"] == {
        WINDOW: {"rope_type": "default", "rope_theta": 10000.0},
        ALL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
    }


@pytest.mark.parametrize(("name", "num_layers"), [("gemma2", 46), ("gemma3", 62)])
def test_the_largest_divides_scores_by_its_width_a_head(
    name: str, num_layers: int, tmp_path: Path
) -> None:
    def edit(file: GgufFile) -> None:
        file.metadata[f"{name}.block_count"] = num_layers
        for key, tensor in list(file.tensors.items()):
            if key.startswith("blk.0."):
                rest = key.removeprefix("blk.0.")
                file.tensors |= {f"blk.{layer}.{rest}": tensor for layer in range(7, num_layers)}

    oracle = random_model(name)
    small = config_of(file_of(oracle, name=name).write(tmp_path / "a.gguf"))
    large = config_of(file_of(oracle, edit, name).write(tmp_path / "b.gguf"))
    assert small["query_pre_attn_scalar"] == CONFIG["head_dim"]
    assert large["query_pre_attn_scalar"] == CONFIG["hidden_size"] // 4


def test_a_second_generation_has_windows_and_caps_where_the_file_says_nothing(
    tmp_path: Path,
) -> None:
    def edit(file: GgufFile) -> None:
        del file.metadata["gemma2.attention.sliding_window"]
        del file.metadata["gemma2.final_logit_softcapping"]

    path = file_of(random_model("gemma2"), edit, "gemma2").write(tmp_path / "model.gguf")
    config = config_of(path)
    assert config["sliding_window"] == 4096
    assert config["layer_types"] == [WINDOW, ALL] * 3 + [WINDOW]
    assert (config["attn_logit_softcapping"], config["final_logit_softcapping"]) == (50.0, 30.0)


def test_a_first_generation_with_windows_is_refused(tmp_path: Path) -> None:
    def edit(file: GgufFile) -> None:
        file.metadata["gemma.attention.sliding_window"] = 8

    path = file_of(random_model("gemma"), edit, "gemma").write(tmp_path / "model.gguf")
    with pytest.raises(BadGguf, match=r"gemma\.attention\.sliding_window is not supported"):
        read_file(path, "config.json")


def short_norm(file: GgufFile) -> None:
    file.tensors["blk.0.post_ffw_norm.weight"] = Packed(np.ones(8, np.float32), "F32")


def factors(file: GgufFile) -> None:
    file.tensors["rope_freqs.weight"] = Packed(np.ones(8, np.float32), "F32")


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (told("attention.sliding_window_pattern", [True]), "sliding_window_pattern: 1 entries of"),
        (told("attention.sliding_window_pattern", 0), "sliding_window_pattern: 0 is below 1"),
        (told("rope.dimension_count", 8), "gemma3.rope.dimension_count: a part of each head"),
        (lambda file: file.metadata.pop("gemma3.rope.freq_base"), "rope.freq_base is missing"),
        (lambda file: file.tensors.pop("blk.3.ffn_norm.weight"), "blk.3.ffn_norm.weight first"),
        (short_norm, r"blk\.0\.post_ffw_norm\.weight has shape \(8,\), expected \(32,\)"),
        (factors, "tensor rope_freqs.weight is not supported with gemma3"),
    ],
)
def test_what_would_change_the_output_is_refused_by_name(
    edit: Edit, said: str, oracle: PreTrainedModel, tmp_path: Path
) -> None:
    path = file_of(oracle, edit).write(tmp_path / "model.gguf")
    with pytest.raises(BadGguf, match=rf"^model\.gguf: .*{said}"):
        read_file(path, "config.json")


def test_the_worker_refuses_the_architecture_and_not_the_file(tmp_path: Path) -> None:
    path = file_of(random_model("gemma"), name="gemma").write(tmp_path / "model.gguf")
    assert read_file(path, "tokenizer.json")
    with pytest.raises(UnsupportedModel, match=r"^architectures: \['GemmaForCausalLM'\] is not"):
        model_config.load(path)
