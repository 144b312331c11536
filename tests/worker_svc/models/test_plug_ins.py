"""A family from outside the tree: a package with an entry point brings it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, SeedOssConfig, SeedOssForCausalLM

from tests.worker_svc.conftest import InstallPackage
from tests.worker_svc.models.configs import LLAMA
from tests.worker_svc.models.test_models import (
    MAX_MODEL_LEN,
    PROMPT_LEN,
    SHAPE,
    Steps,
    assert_same,
    expected_logits,
    make_prompts,
)
from tests.worker_svc.random_models import save_random_model
from worker_svc.models import config as model_config
from worker_svc.models import load_model
from worker_svc.models.spec import UnsupportedModel

SEED_OSS = """
from dataclasses import replace

from worker_svc.models.families import dense
from worker_svc.models.families.family import Family
from worker_svc.models.spec import TensorNames

WITH_PICTURES = "SeedOssForConditionalGeneration"


def read(config):
    spec = dense.decoder(
        config,
        qkv_bias=config.flag("attention_bias", default=True),
        o_bias=config.flag("attention_out_bias"),
        mlp_bias=config.flag("mlp_bias"),
    )
    if config.architecture != WITH_PICTURES:
        return spec
    names = TensorNames(
        embedding="language_model.model.embed_tokens",
        layers="language_model.model.layers",
        final_norm="language_model.model.norm",
        head="language_model.lm_head",
    )
    return replace(spec, names=names)


FAMILY = Family(
    "SeedOssForCausalLM",
    "seed_oss",
    read,
    keys=frozenset({"attention_bias", "attention_out_bias", "mlp_bias"}),
    inert=frozenset({"residual_dropout", "vision_config"}),
    wrappers=frozenset({WITH_PICTURES}),
)
"""


Install = Callable[..., None]


@pytest.fixture
def install(install_package: InstallPackage) -> Install:
    """Installs a package of one module, which serves these architectures."""

    def installed(module: str, source: str, *architectures: str) -> None:
        install_package(module, source, "pagewire.families", dict.fromkeys(architectures, "FAMILY"))

    return installed


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("seed-oss")
    shape = SHAPE | {"num_key_value_heads": 2, "head_dim": 16, "attention_out_bias": True}
    return folder, save_random_model(folder, (SeedOssConfig, SeedOssForCausalLM), shape)


def assert_served(folder: Path, theirs: PreTrainedModel) -> None:
    ours = load_model(folder, torch.float32, torch.device("cpu"), MAX_MODEL_LEN)
    (prompt,) = make_prompts(PROMPT_LEN)
    steps = Steps(ours, [prompt])
    found = [steps.run({0: count})[0] for count in (PROMPT_LEN - 3, 1, 2)]
    assert_same(torch.cat(found), expected_logits(theirs, prompt))


def test_a_plug_in_serves_a_family(
    checkpoint: tuple[Path, PreTrainedModel], install: Install
) -> None:
    with pytest.raises(UnsupportedModel, match=r"^architectures: \['SeedOssForCausalLM'\] is not"):
        model_config.load(checkpoint[0])
    install("pagewire_seed_oss", SEED_OSS, "SeedOssForCausalLM")
    assert_served(*checkpoint)


def nested(folder: Path, into: Path, **around: Any) -> None:
    """The same checkpoint as the part of a model that reads text."""
    inner = json.loads((folder / "config.json").read_text())
    dtype = inner.pop("dtype")
    outer = {
        "architectures": ["SeedOssForConditionalGeneration"],
        "model_type": "seed_oss_vl",
        "dtype": dtype,
        "text_config": inner,
        "vision_config": {"patch_size": 14},
    }
    into.mkdir()
    (into / "config.json").write_text(json.dumps(outer | around))
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {f"language_model.{name}": tensor for name, tensor in tensors.items()},
        into / "model.safetensors",
    )


def test_a_family_is_served_as_a_part_of_a_model(
    checkpoint: tuple[Path, PreTrainedModel], install: Install, tmp_path: Path
) -> None:
    install("pagewire_seed_oss", SEED_OSS, "SeedOssForCausalLM", "SeedOssForConditionalGeneration")
    folder, theirs = checkpoint
    nested(folder, tmp_path / "nested")
    spec = model_config.load(tmp_path / "nested")
    assert spec.architecture == "SeedOssForConditionalGeneration"
    assert spec.checkpoint_dtype == "float32"
    assert_served(tmp_path / "nested", theirs)


@pytest.mark.parametrize(
    ("around", "named"),
    [
        ({"vocab_size": 97}, r"^text_config\.vocab_size: differs from vocab_size of config\.json"),
        ({"text_config": None}, "^config.json: text_config is None, not an object"),
        ({"image_token_id": 7}, "^image_token_id: this key of config.json is not known"),
        ({"text_config": {"model_type": "llama"}}, "^model_type: 'llama' is not that of SeedOss"),
    ],
)
def test_what_stands_around_a_decoder_is_served_or_refused_by_name(
    checkpoint: tuple[Path, PreTrainedModel],
    install: Install,
    tmp_path: Path,
    around: dict[str, Any],
    named: str,
) -> None:
    install("pagewire_seed_oss", SEED_OSS, "SeedOssForConditionalGeneration")
    nested(checkpoint[0], tmp_path / "nested", **around)
    with pytest.raises(UnsupportedModel, match=named):
        model_config.load(tmp_path / "nested")


def refused(tmp_path: Path, architecture: str) -> str:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA | {"architectures": [architecture]}))
    with pytest.raises(UnsupportedModel) as caught:
        model_config.load(folder)
    return str(caught.value)


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("import a_module_that_is_not_there", "cannot be imported: ModuleNotFoundError"),
        ("FAMILY = 'llama'", "holds no family of NewForCausalLM"),
        (SEED_OSS, "holds no family of NewForCausalLM"),
    ],
)
def test_a_plug_in_that_cannot_be_used_is_named(
    tmp_path: Path, install: Install, source: str, named: str
) -> None:
    install("pagewire_new", source, "NewForCausalLM")
    assert named in refused(tmp_path, "NewForCausalLM")


def test_two_plug_ins_for_an_architecture_are_refused(tmp_path: Path, install: Install) -> None:
    install("pagewire_first", SEED_OSS, "SeedOssForCausalLM")
    install("pagewire_second", SEED_OSS, "SeedOssForCausalLM")
    said = refused(tmp_path, "SeedOssForCausalLM")
    assert "several plug-ins serve SeedOssForCausalLM: pagewire_first:FAMILY, pagewire_sec" in said


def test_an_unknown_architecture_is_told_those_of_plug_ins(
    tmp_path: Path, install: Install
) -> None:
    install("pagewire_seed_oss", SEED_OSS, "SeedOssForCausalLM")
    assert refused(tmp_path, "OtherForCausalLM").endswith("ForCausalLM, SeedOssForCausalLM")


def test_a_built_in_family_is_not_replaced(tmp_path: Path, install: Install) -> None:
    install("pagewire_llama", "raise SystemExit", "LlamaForCausalLM")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert model_config.load(tmp_path).architecture == "LlamaForCausalLM"
