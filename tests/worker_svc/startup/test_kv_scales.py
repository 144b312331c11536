"""Scales of an FP8 KV cache out of a checkpoint: names, shapes, shards, and what is refused."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kernels import fp8
from pagewire.hub.weights_index import INDEX
from tests.worker_svc.conftest import WORKER_CONFIG
from worker_svc.models import config
from worker_svc.models.decoder import Decoder
from worker_svc.models.sharding import Sharding
from worker_svc.models.stored.weight_files import MissingWeight
from worker_svc.models.weights import UnexpectedWeight, WrongShape
from worker_svc.startup import kv_scales, startup
from worker_svc.startup.kv_scales import UnusableScale

CPU, E4M3 = torch.device("cpu"), torch.float8_e4m3fn
LAYERS, HEADS = 2, 2
FP8 = replace(WORKER_CONFIG, kv_cache_dtype="fp8_e4m3")


def plain(layer: int, side: str) -> str:
    return f"model.layers.{layer}.self_attn.{side}_scale"


def by_projection(layer: int, side: str) -> str:
    return f"model.layers.{layer}.self_attn.{side}_proj.{side}_scale"


def everywhere(values: dict[str, Tensor], name=plain) -> dict[str, Tensor]:
    return {name(layer, side): values[side].clone() for layer in range(LAYERS) for side in "kv"}


def save(folder: Path, to: Path, tensors: dict[str, Tensor]) -> Path:
    (to / "config.json").write_bytes((folder / "config.json").read_bytes())
    save_file(load_file(folder / "model.safetensors") | tensors, to / "model.safetensors")
    return to


def read(folder: Path, rank: int = 0, size: int = 1) -> Tensor:
    return kv_scales.read(folder, Sharding(config.load(folder), rank, size), CPU)


def test_without_scales_they_are_one(llama_folder: Path) -> None:
    assert torch.equal(read(llama_folder), torch.ones(LAYERS, 4, HEADS))


@pytest.mark.parametrize("name", [plain, by_projection])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_scale_a_layer(llama_folder, tmp_path, name, shape, dtype) -> None:
    tensors = everywhere({"k": torch.full(shape, 0.5), "v": torch.full(shape, 4.0)}, name)
    tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    table = read(save(llama_folder, tmp_path, tensors))
    assert table[0].tolist() == [[0.5] * 2, [4.0] * 2, [2.0] * 2, [0.25] * 2]
    assert torch.equal(table[0], table[1])


@pytest.mark.parametrize("shape", [(2,), (2, 1, 1)], ids=str)
def test_a_rank_has_the_scales_of_its_own_heads(llama_folder, tmp_path, shape) -> None:
    k, v = torch.tensor([0.5, 2.0]).view(shape), torch.tensor([1.0, 8.0]).view(shape)
    folder = save(llama_folder, tmp_path, everywhere({"k": k, "v": v}))
    assert read(folder)[1, :2].tolist() == [[0.5, 2.0], [1.0, 8.0]]
    assert read(folder, 0, 2)[1, :2].tolist() == [[0.5], [1.0]]
    assert read(folder, 1, 2)[1, :2].tolist() == [[2.0], [8.0]]
    assert read(folder, 1, 4)[1, :2].tolist() == [[0.5], [1.0]]  # two ranks share a head
    assert read(folder, 2, 4)[1, :2].tolist() == [[2.0], [8.0]]


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf, -math.inf, 1e-38, 3e38])
def test_a_scale_that_nothing_can_be_stored_with_is_refused_by_name(
    llama_folder, tmp_path, bad
) -> None:
    tensors = everywhere({"k": torch.ones(2), "v": torch.ones(2)})
    tensors[plain(1, "v")][1] = bad
    folder = save(llama_folder, tmp_path, tensors)
    with pytest.raises(UnusableScale, match=r"model\.layers\.1\.self_attn\.v_scale: is "):
        startup.load(FP8, folder, "float32", "")


def test_scales_of_another_shape_or_type_are_refused_by_name(llama_folder, tmp_path) -> None:
    tensors = everywhere({"k": torch.ones(3), "v": torch.ones(1)})
    with pytest.raises(WrongShape, match=r"self_attn\.k_scale: has shape \(3,\), expected 1 or 2"):
        read(save(llama_folder, tmp_path, tensors))
    tensors = everywhere({"k": torch.ones(1, dtype=torch.int32), "v": torch.ones(1)})
    with pytest.raises(UnusableScale, match=r"self_attn\.k_scale: is of torch\.int32"):
        read(save(llama_folder, tmp_path, tensors))


def test_a_checkpoint_has_all_scales_or_none(llama_folder, tmp_path) -> None:
    tensors = everywhere({"k": torch.ones(1), "v": torch.ones(1)})
    missing = {name: tensor for name, tensor in tensors.items() if name != plain(1, "k")}
    with pytest.raises(MissingWeight, match=r"layers\.1\.self_attn\.k_scale not found"):
        read(save(llama_folder, tmp_path, missing))
    with pytest.raises(
        UnexpectedWeight, match=r"k_scale: model\.layers\.0\.\S*k_scale is there, too"
    ):
        read(save(llama_folder, tmp_path, tensors | {by_projection(0, "k"): torch.ones(1)}))
    with pytest.raises(UnexpectedWeight, match=r"layers\.2.*: the model has 2 layers"):
        read(save(llama_folder, tmp_path, tensors | {plain(2, "k"): torch.ones(1)}))


def test_scales_may_be_in_any_file_of_the_checkpoint(llama_folder, tmp_path) -> None:
    weights = load_file(llama_folder / "model.safetensors")
    scales = everywhere({"k": torch.tensor([0.25]), "v": torch.tensor([2.0])})
    save_file(weights, tmp_path / "a.safetensors")
    save_file(scales, tmp_path / "b.safetensors")
    places = dict.fromkeys(weights, "a.safetensors") | dict.fromkeys(scales, "b.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": places}))
    (tmp_path / "config.json").write_bytes((llama_folder / "config.json").read_bytes())
    assert read(tmp_path)[0, :2].tolist() == [[0.25] * 2, [2.0] * 2]


def test_the_cache_of_a_model_has_its_scales_in_fp8_alone(llama_folder, tmp_path) -> None:
    scales = everywhere({"k": torch.tensor([0.25]), "v": torch.tensor([2.0])})
    folder = save(llama_folder, tmp_path, scales)
    model = startup.load(FP8, folder, "float32", "").decoder
    table = model.new_cache(4, 16).of_layer(1).scales
    assert table is not None
    assert table[:2].tolist() == [[0.25] * 2, [2.0] * 2]
    plain_model = startup.load(WORKER_CONFIG, folder, "float32", "").decoder
    assert plain_model.new_cache(4, 16).of_layer(1).scales is None
    # Where nothing is loaded, as on the meta device, they are 1.
    bare = Decoder(config.load(folder), torch.float32, CPU, 64, kv_dtype=E4M3)
    fp8.check_scales(bare.new_cache(4, 16).of_layer(0).scales, E4M3, HEADS)


def test_other_scales_than_those_of_keys_and_values_are_refused(llama_folder, tmp_path) -> None:
    name = "model.layers.0.self_attn.q_scale"
    folder = save(llama_folder, tmp_path, {name: torch.ones(1)})
    with pytest.raises(UnexpectedWeight, match="q_scale: the model has no such parameter"):
        startup.load(FP8, folder, "float32", "")
