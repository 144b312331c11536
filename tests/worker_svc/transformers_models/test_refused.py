"""Refusals by name of checkpoints that transformers would compute, or ignore a part of."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.worker_svc.transformers_models.families import NATIVE_HYBRIDS, write
from worker_svc.config import UnsupportedOption, WorkerConfig
from worker_svc.models.spec import ModelSpec, UnsupportedModel
from worker_svc.models.stored.weight_files import MissingWeight
from worker_svc.models.weights import UnexpectedWeight
from worker_svc.startup import implementation, startup
from worker_svc.transformers_models.config import TransformersConfig

DEVICE = torch.device("cpu")
CPU = WorkerConfig(device="cpu", dtype="float32", max_model_len=64)


@pytest.fixture(scope="module")
def olmo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write("olmo2", tmp_path_factory.mktemp("olmo2"))


@pytest.fixture(scope="module")
def mistral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write("mistral", tmp_path_factory.mktemp("mistral"))


def changed(source: Path, to: Path, **keys: Any) -> Path:
    """The folder with other values in its config.json."""
    to.mkdir(exist_ok=True)
    for file in source.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    config = json.loads((source / "config.json").read_text()) | keys
    (to / "config.json").write_text(json.dumps(config))
    return to


def load(folder: Path, **options: Any) -> startup.LoadedModel:
    return startup.load(replace(CPU, **options), folder, "float32", "")


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"logit_bend": 0.5}, "logit_bend: this key"),
        ({"model_type": "olmo9"}, "nearest it knows: olmo"),
        ({"architectures": ["Olmo9ForCausalLM"]}, "nearest it knows: Olmo"),
        ({"architectures": ["Olmo2ForSequenceClassification"]}, "generates no text"),
        ({"architectures": ["Olmo2ForCausalLM"] * 2}, "architectures: "),
        ({"max_position_embeddings": 63}, "max_model_len: 64"),
        ({"hidden_act": "gelu_of_mine"}, "gelu_of_mine"),
        ({"auto_map": {"AutoModelForCausalLM": "x.Y"}, "model_type": "mine"}, "mine"),
        ({"quantization_config": {"quant_method": "hqq"}}, "hqq"),
        ({"layer_types": ["full_attention", "sideways", "full_attention"]}, "sideways"),
    ],
)
def test_a_configuration(olmo: Path, tmp_path: Path, keys: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        load(changed(olmo, tmp_path / "changed", **keys))


def test_a_key_that_is_ignored_by_name_or_asks_for_nothing(olmo: Path, tmp_path: Path) -> None:
    folder = changed(olmo, tmp_path / "changed", logit_bend=0.5, attn_logit_softcapping=None)
    assert load(folder, ignore_config_keys=("logit_bend",)).facts.architecture == "Olmo2ForCausalLM"


@pytest.mark.parametrize(("kind", "longest"), [("dynamic", 32), ("longrope", 32)])
def test_a_rotation_that_would_depend_on_other_requests(
    olmo: Path, tmp_path: Path, kind: str, longest: int
) -> None:
    rotation = {
        "rope_type": kind,
        "rope_theta": 1e4,
        "factor": 2.0,
        "original_max_position_embeddings": longest,
    }
    if kind == "longrope":
        rotation |= {"short_factor": [1.0] * 6, "long_factor": [2.0] * 6}
    folder = changed(olmo, tmp_path / "changed", rope_parameters=rotation)
    with pytest.raises(UnsupportedModel, match=f"'{kind}' depends.* --max-model-len {longest}"):
        load(folder)
    assert load(folder, max_model_len=longest).facts.max_model_len == longest


@pytest.mark.parametrize(
    "options",
    [
        {"kv_cache_dtype": "fp8"},
        {"quantization": "int8"},
        {"draft_model": Path("elsewhere")},
    ],
)
def test_an_option(olmo: Path, options: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedOption, match=f"^{next(iter(options))}: "):
        load(olmo, **options)


def test_weights_that_lack_or_have_too_much(olmo: Path, tmp_path: Path) -> None:
    folder = changed(olmo, tmp_path / "changed")
    tensors = load_file(folder / "model.safetensors")
    norm = tensors.pop("model.norm.weight")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(MissingWeight, match=r"model\.norm\.weight not found"):
        load(folder)
    extra = {"model.norm.weight": norm, "v_head.weight": torch.zeros(3)}
    save_file(tensors | extra, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnexpectedWeight, match=r"v_head\.weight"):
        load(folder)
    load(folder, ignore_weights=("v_head.*",))
    drafting = {"model.norm.weight": norm, "mtp.layers.0.weight": torch.zeros(3)}
    save_file(tensors | drafting, folder / "model.safetensors", {"format": "pt"})
    load(folder)


def test_layers_of_ours_serve_what_they_can_and_the_library_the_rest(
    olmo: Path, mistral: Path
) -> None:
    assert isinstance(implementation.shape_of(CPU, olmo, DEVICE), TransformersConfig)
    assert isinstance(implementation.shape_of(CPU, mistral, DEVICE), ModelSpec)
    forced = replace(CPU, model_impl="transformers")
    assert isinstance(implementation.shape_of(forced, mistral, DEVICE), TransformersConfig)
    with pytest.raises(UnsupportedModel, match="architectures"):
        implementation.shape_of(replace(CPU, model_impl="native"), olmo, DEVICE)


@pytest.mark.parametrize("name", [*NATIVE_HYBRIDS, "gemma4"])
def test_layers_of_ours_that_are_not_measured_on_a_gpu_are_not_chosen_there_unasked(
    name: str, tmp_path: Path
) -> None:
    folder = write(name, tmp_path / name)
    cuda = torch.device("cuda")
    unasked = TransformersConfig if name == "gemma4" else ModelSpec
    assert isinstance(implementation.shape_of(CPU, folder, DEVICE), ModelSpec)
    assert isinstance(implementation.shape_of(CPU, folder, cuda), unasked)
    native = replace(CPU, model_impl="native")
    assert isinstance(implementation.shape_of(native, folder, cuda), ModelSpec)


@pytest.mark.parametrize(
    ("name", "ranks", "named"),
    [
        ("granite_hybrid", 2, "tensor_parallel_size: 2 ranks are not supported"),
        ("nemotron_h", 4, "groups of Mamba-2: 2 does not divide"),
    ],
)
def test_a_hybrid_that_layers_of_ours_do_not_divide_goes_to_the_library(
    name: str, ranks: int, named: str, tmp_path: Path
) -> None:
    folder = write(name, tmp_path / name)
    several = replace(CPU, tensor_parallel_size=ranks)
    assert isinstance(implementation.shape_of(several, folder, DEVICE), TransformersConfig)
    with pytest.raises(UnsupportedModel, match=named):
        implementation.shape_of(replace(several, model_impl="native"), folder, DEVICE)


def test_random_weights_of_a_configuration_alone(olmo: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((olmo / "config.json").read_bytes())
    model = load(tmp_path, load_format="dummy")
    again = load(tmp_path, load_format="dummy")
    hidden = torch.randn(3, 48)
    assert torch.equal(model.decoder.logits(hidden), again.decoder.logits(hidden))


@pytest.mark.parametrize(
    ("kind", "sizes", "named"),
    [
        (
            "codegen",
            {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_inner": 48, "rotary_dim": 4},
            "does not pass its attention",
        ),
        (
            "falcon",
            {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
            "cannot be computed over a paged cache",
        ),
        (
            "bart",
            {
                "d_model": 32,
                "decoder_layers": 2,
                "decoder_attention_heads": 4,
                "decoder_ffn_dim": 48,
            },
            "step by step it gives other hidden states",
        ),
    ],
)
def test_a_class_that_computes_something_out_of_a_cache_of_its_own(
    tmp_path: Path, kind: str, sizes: dict[str, Any], named: str
) -> None:
    torch.manual_seed(0)
    given = sizes | {"vocab_size": 64, "forced_eos_token_id": None, "eos_token_id": None}
    config = AutoConfig.for_model(kind, **given, bos_token_id=None, pad_token_id=0)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(tmp_path / kind)
    with pytest.raises(UnsupportedModel, match=named):
        load(tmp_path / kind)


def test_a_rule_of_generation_in_the_configuration(olmo: Path, tmp_path: Path) -> None:
    folder = changed(olmo, tmp_path / "changed", no_repeat_ngram_size=3)
    with pytest.raises(UnsupportedModel, match="no_repeat_ngram_size: 3"):
        load(folder)


def test_a_key_next_to_the_text_of_a_model_with_pictures(tmp_path: Path) -> None:
    folder = write("gemma3_vl", tmp_path / "plain")
    assert load(folder).facts.architecture == "Gemma3ForConditionalGeneration"
    with pytest.raises(UnsupportedModel, match="logit_bend: this key"):
        load(changed(folder, tmp_path / "changed", logit_bend=0.5))
