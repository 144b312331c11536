"""gpt-oss with experts in MXFP4: the numbers that they stand for, and transformers' tokens."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.worker_svc.models.configs import read
from tests.worker_svc.models.test_experts_served import CONFIG
from tests.worker_svc.models.test_models import MAX_MODEL_LEN
from tests.worker_svc.mxfp4_checkpoints import SETTINGS, meaning, random_codes, save_mxfp4
from tests.worker_svc.transformers_models import test_served
from tests.worker_svc.transformers_models.families import write
from tests.worker_svc.transformers_models.test_served import Family
from worker_svc.models import Decoder, load_model
from worker_svc.models import config as model_config
from worker_svc.models.mxfp4_experts import DamagedExperts, Mxfp4Tensor
from worker_svc.models.spec import UnsupportedModel
from worker_svc.models.stored import dummy
from worker_svc.models.stored.quantized import load_quantized
from worker_svc.models.weights import MissingWeight, WrongShape
from worker_svc.parallel.group import Group
from worker_svc.quantization.mxfp4 import widened

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {"head_dim": 16, "hidden_size": 64}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint in MXFP4, and its twin in float32."""
    root = tmp_path_factory.mktemp("mxfp4")
    plain = write("gpt_oss", root / "plain", SIZES)
    save_mxfp4(plain, root / "stored", root / "twin")
    return root / "stored", root / "twin"


@pytest.fixture(scope="module")
def family(folders: tuple[Path, Path]) -> Iterator[Family]:
    stored, twin = folders
    with test_served.served("gpt_oss", stored, CONFIG, twin) as found:
        yield found


test_one_at_a_time = test_served.test_one_at_a_time_and_again_after_a_cached_prefix
test_eight_at_a_time = test_served.test_eight_at_a_time_in_chunks_with_preemptions_and_a_lost_worker


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_code_and_scale_is_its_number(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(1, 16, 16)
    scales = torch.tensor([[0, 1, 64, 100, 120, 126, 127, 128, 129, 140, 160, 200, 251, 90, 2, 5]])
    scales = scales.to(torch.uint8)
    expected = meaning(codes, scales).to(dtype)
    assert torch.equal(widened(codes, scales, dtype), expected)
    with pytest.raises(ValueError, match="scales: hold NaN"):
        widened(codes, scales.clone().fill_(255), dtype)


def experts_of(folder: Path, rank: int, size: int) -> dict[str, Tensor]:
    """The weights of a rank's experts by the name in the checkpoint."""
    spec = model_config.load(folder)
    assert spec.quantization is not None
    model = Decoder(spec, torch.float32, CPU, MAX_MODEL_LEN, Group(rank, size))
    destinations, share = dict(model.destinations()), model.sharding.share
    load_quantized(folder, spec.quantization, destinations, frozenset(), share, CPU)
    every = [to for to in destinations.values() if isinstance(to, Mxfp4Tensor)]
    return {to.experts.name: to.experts.values for to in every}


def test_ranks_have_parts_of_each_expert(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGEWIRE_CPU_KERNELS", "0")  # so that all are numbers
    whole = experts_of(folders[0], 0, 1)
    assert len(whole) == 2 * 3  # of three layers
    for rank in range(2):
        for name, part in experts_of(folders[0], rank, 2).items():
            if name.endswith("gate_up_proj"):
                gate, up = (half.chunk(2, 1)[rank] for half in whole[name].chunk(2, 1))
                assert torch.equal(part, torch.cat((gate, up), 1)), name
            else:
                assert torch.equal(part, whole[name].chunk(2, 2)[rank]), name


def test_a_rank_that_would_cut_a_block_is_refused_by_name(folders: tuple[Path, Path]) -> None:
    with pytest.raises(
        UnsupportedModel, match=r"^quantization: mxfp4 has blocks of 32 .* 64 and 1"
    ):
        experts_of(folders[0], 0, 4)


@pytest.mark.parametrize("are_dense", [False, True])
def test_a_model_without_stacked_experts_is_refused(tmp_path: Path, are_dense: bool) -> None:
    layers = [*range(4)] if are_dense else []
    with pytest.raises(UnsupportedModel, match=r"^quantization: mxfp4 is not supported for Qwen3"):
        read(tmp_path, "qwen3-30b-a3b", quantization_config=SETTINGS, mlp_only_layers=layers)


def damaged(folders: tuple[Path, Path], to: Path, changes: dict[str, Tensor | None]) -> Path:
    """A copy of the checkpoint with other tensors in the first layer's experts."""
    to.mkdir(exist_ok=True)
    tensors = load_file(folders[0] / "model.safetensors")
    for name, tensor in changes.items():
        full = f"model.layers.0.mlp.experts.{name}"
        del tensors[full]
        if tensor is not None:
            tensors[full] = tensor
    save_file(tensors, to / "model.safetensors", {"format": "pt"})
    (to / "config.json").write_text((folders[0] / "config.json").read_text())
    return to


def test_damaged_experts_are_refused_by_name(folders: tuple[Path, Path], tmp_path: Path) -> None:
    blocks, scales = random_codes((4, 64, 64), 0)
    for changes, kind, named in (
        ({"down_proj_scales": None}, MissingWeight, "down_proj_scales not found"),
        (
            {"down_proj_blocks": blocks[..., :8].contiguous()},
            WrongShape,
            "down_proj_blocks: has shape",
        ),
        ({"down_proj_blocks": blocks.float()}, DamagedExperts, r"blocks: is of torch\.float32"),
        ({"down_proj_scales": scales.fill_(255)}, DamagedExperts, "down_proj_scales: hold NaN"),
    ):
        folder = damaged(folders, tmp_path, changes)
        with pytest.raises(kind, match=named):
            load_model(folder, torch.float32, CPU, MAX_MODEL_LEN)


def test_random_weights_are_codes(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGEWIRE_CPU_KERNELS", "0")  # which would keep them in 4 bits
    spec = model_config.load(folders[0])
    model = Decoder(spec, torch.float32, CPU, 32)
    destinations = dict(model.destinations())
    dummy.fill(destinations, spec.quantization, model.sharding.share, torch.float32, CPU)
    drawn = [to.experts.values for to in destinations.values() if isinstance(to, Mxfp4Tensor)]
    for values in drawn:
        assert 0.01 < float(values.std()) < 0.04
        assert len(values.unique()) == 15  # of one scale; 0 has two codes


def test_a_key_that_is_not_known_is_refused(folders: tuple[Path, Path], tmp_path: Path) -> None:
    config = json.loads((folders[0] / "config.json").read_text())
    config["quantization_config"]["a_key_of_tomorrow"] = 1
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match=r"quantization_config\.a_key_of_tomorrow"):
        model_config.load(tmp_path)
