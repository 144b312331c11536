"""Installed packages and names, and the cost of importing the SDK."""

import importlib.metadata
import json
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from email.parser import BytesParser
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from transformers.utils.import_utils import is_kernels_available

import kernels
from tests.pace import patience
from tests.packaging.wheels import build_wheel
from tests.test_repository import files, relative

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SERVICES = {
    *("gateway", "scheduler_svc", "worker_svc"),
    *("default_model", "kernels", "simulator", "wire"),
}
HEAVY = {
    "fastapi",
    "gateway",
    "gguf",
    "jinja2",
    "kernels",
    "numpy",
    "pydantic",
    "safetensors",
    "scheduler_svc",
    "tokenizers",
    "torch",
    "transformers",
    "triton",
    "uvicorn",
    "worker_svc",
    "xxhash",
}


def test_the_kernels_imported_are_ours_and_no_distribution_claims_the_name() -> None:
    assert Path(kernels.__file__) == ROOT / "kernels" / "__init__.py"
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("kernels")


def test_transformers_does_not_take_our_kernels_for_its_own() -> None:
    assert is_kernels_available() is False
    # Another package reads this number as the version of its own.
    assert kernels.__version__.startswith("0.1.")
    assert PROJECT["version"].startswith("0.1.")


def test_transformers_loads_a_model_and_a_tokenizer_beside_our_kernels(tmp_path: Path) -> None:
    words = ["<unk>", "hello", "world", "again"]
    words_to_ids = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, "<unk>"))
    words_to_ids.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words_to_ids).save_pretrained(tmp_path)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    config = LlamaConfig(vocab_size=len(words), eos_token_id=None, **sizes, **heads)
    saved = LlamaForCausalLM(config)
    saved.save_pretrained(tmp_path)

    inputs = AutoTokenizer.from_pretrained(tmp_path)("hello world", return_tensors="pt")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert inputs["input_ids"].tolist() == [[1, 2]]
    output = loaded.generate(inputs["input_ids"], max_new_tokens=3, do_sample=False)
    assert output.shape == (1, 5)
    assert torch.equal(loaded(output).logits, saved(output).logits)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    with zipfile.ZipFile(build_wheel(tmp_path_factory.mktemp("wheel"))) as opened:
        yield opened


def test_the_wheel_has_one_name_at_the_top(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    information = f"pagewire-{PROJECT['version']}.dist-info"
    assert {name.split("/")[0] for name in names} == {"pagewire", information}
    assert {"pagewire/__init__.py", "pagewire/py.typed"} <= names
    stubs = {f"pagewire/v1/{p.name}" for p in (ROOT / "pagewire" / "v1").glob("*_pb2*.py*")}
    assert stubs and stubs <= names
    assert f"{information}/licenses/LICENSE" in names


def test_the_wheel_holds_every_file_of_the_services(wheel: zipfile.ZipFile) -> None:
    inside = "pagewire/_services/"
    shipped = {name.removeprefix(inside) for name in wheel.namelist() if name.startswith(inside)}
    tree = {name for path in files() if (name := relative(path)).split("/")[0] in SERVICES}
    assert shipped == tree
    assert {"kernels/cpu/layer.c", "kernels/cpu/gemm.h"} <= shipped


def test_the_wheel_depends_on_grpc_and_protobuf_alone(wheel: zipfile.ZipFile) -> None:
    (metadata,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    requirements = BytesParser().parsebytes(wheel.read(metadata)).get_all("Requires-Dist", [])
    always = [r for r in requirements if "extra ==" not in r]
    assert sorted(r.split(">")[0].split("<")[0] for r in always) == ["grpcio", "protobuf"]


@pytest.mark.parametrize("module", ["pagewire", "pagewire.cli"])
def test_importing_the_sdk_imports_no_service_and_nothing_heavy(module: str) -> None:
    code = f"import sys, json, {module} as m; print(json.dumps([m.__file__, *sys.modules]))"
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=patience(60),
    )
    assert ran.returncode == 0, ran.stderr
    file, *imported = json.loads(ran.stdout)
    assert file is not None and Path(file).is_relative_to(ROOT / "pagewire")
    assert "grpc" in imported
    assert {name.split(".")[0] for name in imported} & HEAVY == set()
