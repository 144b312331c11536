"""A checkpoint that asks for an FP8 KV cache gets one, with the scales that it has."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.worker_svc.conftest import WORKER_CONFIG
from tests.worker_svc.models.test_models import MAX_MODEL_LEN
from tests.worker_svc.quantized_checkpoints import FORMATS, save_quantized
from worker_svc.models.stored.weight_files import MissingWeight
from worker_svc.startup import startup

CONFIG = replace(WORKER_CONFIG, max_model_len=MAX_MODEL_LEN)
# As a library writes it.
SCHEME = {
    "actorder": None,
    "block_structure": None,
    "dynamic": False,
    "group_size": None,
    "num_bits": 8,
    "observer": "minmax",
    "observer_kwargs": {},
    "strategy": "tensor",
    "symmetric": True,
    "type": "float",
}


@pytest.fixture
def folder(plain: Mapping[str, Path], tmp_path: Path) -> Path:
    """A quantized checkpoint with the scheme, and no scales yet."""
    save_quantized(plain["llama"], tmp_path / "q", tmp_path / "twin", FORMATS["packed"])
    path = tmp_path / "q" / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["kv_cache_scheme"] = SCHEME
    path.write_text(json.dumps(config))
    return tmp_path / "q"


def add_scales(folder: Path) -> None:
    """Keys of 0.25 and values of 2 in both layers."""
    names = [f"model.layers.{layer}.self_attn" for layer in range(2)]
    scales: dict[str, Tensor] = {f"{name}.k_scale": torch.tensor([0.25]) for name in names}
    scales |= {f"{name}.v_scale": torch.tensor([2.0]) for name in names}
    path = folder / "model.safetensors"
    save_file(load_file(path) | scales, path)


@pytest.mark.parametrize(
    ("option", "dtype"),
    [
        ("auto", torch.float8_e4m3fn),
        ("fp8", torch.float8_e4m3fn),
        ("fp8_e5m2", torch.float8_e5m2),
    ],
)
def test_the_cache_has_the_checkpoints_type_unless_another_is_asked_for(
    folder: Path, option: str, dtype: torch.dtype
) -> None:
    add_scales(folder)
    config = replace(CONFIG, kv_cache_dtype=option)
    model = startup.load(config, folder, "float32", "").decoder
    assert model.kv_dtype == dtype
    scales = model.new_cache(4, 16).of_layer(1).scales
    assert scales is not None
    assert scales[:2].tolist() == [[0.25, 0.25], [2.0, 2.0]]


def test_scales_that_are_promised_and_missing_are_named(folder: Path) -> None:
    with pytest.raises(MissingWeight, match=r"layers\.0\.self_attn\.k_scale not found"):
        startup.load(CONFIG, folder, "float32", "")
