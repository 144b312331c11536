"""Quantized checkpoints in several files: the index says which tensor counts, for each rank."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.worker_svc.models.test_models import MAX_MODEL_LEN
from tests.worker_svc.parallel.test_tensor_parallel import on_ranks
from tests.worker_svc.quantization.conftest import logits_and_tokens
from tests.worker_svc.quantized_checkpoints import FORMATS, save_quantized
from worker_svc.models import load_model
from worker_svc.models.stored.weight_files import MissingWeight
from worker_svc.parallel.group import ALONE, Group

CPU = torch.device("cpu")
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
METHODS = ["gptq", "fp8-block", "packed"]


def of_none(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of the same shapes and types, of an older model, say."""
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


def split(folder: Path) -> None:
    """Two shards, each with half of the tensors and with stale copies of the other half."""
    tensors = load_file(folder / SINGLE)
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for number in range(2):
        file, own = f"model-{number}.safetensors", set(names[number::2])
        stale = of_none({name: tensor for name, tensor in tensors.items() if name not in own})
        save_file({name: tensors[name] for name in own} | stale, folder / file)
        weight_map |= dict.fromkeys(own, file)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    (folder / SINGLE).unlink()


@pytest.fixture
def saved(plain: Mapping[str, Path], tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A quantized checkpoint of the method that the test has, and its twin."""
    name = request.node.callspec.params["name"]
    save_quantized(plain["llama"], tmp_path / "model", tmp_path / "twin", FORMATS[name])
    return tmp_path


def run(folder: Path, group: Group = ALONE) -> tuple[Tensor, list[int]]:
    return logits_and_tokens(load_model(folder, torch.float32, CPU, MAX_MODEL_LEN, group), 4)


@pytest.mark.parametrize("name", METHODS)
def test_a_tensor_counts_only_where_the_index_says(name: str, saved: Path) -> None:
    wanted = run(saved / "twin")
    split(saved / "model")
    for logits, tokens in (run(saved / "model"), *on_ranks(2, lambda g: run(saved / "model", g))):
        assert (logits - wanted[0]).abs().max() < 2e-4 and tokens == wanted[1]


@pytest.mark.parametrize("name", METHODS)
def test_one_file_wins_over_the_index_of_older_ones(name: str, saved: Path) -> None:
    wanted = run(saved / "twin")
    whole = (saved / "model" / SINGLE).read_bytes()
    split(saved / "model")
    for number in range(2):
        file = saved / "model" / f"model-{number}.safetensors"
        save_file(of_none(load_file(file)), file)
    (saved / "model" / SINGLE).write_bytes(whole)
    logits, tokens = run(saved / "model")
    assert (logits - wanted[0]).abs().max() < 2e-4 and tokens == wanted[1]


@pytest.mark.parametrize("name", METHODS)
def test_a_tensor_that_the_index_names_in_vain_is_told(name: str, saved: Path) -> None:
    split(saved / "model")
    index = json.loads((saved / "model" / INDEX).read_text())
    part = next(
        tensor for tensor in index["weight_map"] if ".down_proj." in tensor and "bias" not in tensor
    )
    del index["weight_map"][part]
    (saved / "model" / INDEX).write_text(json.dumps(index))
    with pytest.raises(MissingWeight, match=part):
        run(saved / "model")
