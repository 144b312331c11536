"""Quantized checkpoints of families that transformers computes: the numbers that they stand for."""

import itertools
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.worker_svc.quantized_checkpoints import FORMATS, save_quantized
from tests.worker_svc.transformers_models.families import write
from worker_svc.config import WorkerConfig
from worker_svc.startup import startup
from worker_svc.transformers_models.model import TransformersModel

CPU = WorkerConfig(device="cpu", dtype="float32", max_model_len=64, model_impl="transformers")
SIZES = {"head_dim": 16, "hidden_size": 64}
FAMILIES = itertools.cycle(("olmo2", "phi3", "gemma2"))


@pytest.mark.parametrize(("family", "name"), [*zip(FAMILIES, FORMATS, strict=False)])
def test_weights_are_the_numbers_that_the_checkpoint_stands_for(
    family: str, name: str, tmp_path: Path
) -> None:
    plain = write(family, tmp_path / "plain", SIZES)
    save_quantized(plain, tmp_path / "stored", tmp_path / "twin", FORMATS[name])
    stored, twin = (load(tmp_path / folder) for folder in ("stored", "twin"))
    parameters = dict(twin._layers.named_parameters())
    assert parameters
    for path, parameter in stored._layers.named_parameters():
        torch.testing.assert_close(parameter, parameters[path], rtol=1e-6, atol=1e-6)
    different = load(plain)._layers.state_dict()
    assert any(not torch.equal(parameters[path], different[path]) for path in parameters)


def test_buffers_of_a_quantized_checkpoint_are_read(tmp_path: Path) -> None:
    plain = write("gemma4", tmp_path / "plain", SIZES)
    scalars = {
        f"model.layers.{index}.layer_scalar": torch.tensor([2.0 + index]) for index in (0, 1)
    }
    file = plain / "model.safetensors"
    save_file(load_file(file) | scalars, file, {"format": "pt"})
    save_quantized(plain, tmp_path / "stored", tmp_path / "twin", FORMATS["int8"])
    path = tmp_path / "stored" / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["ignore"] += ["re:.*per_layer.*"]  # which stay plain
    path.write_text(json.dumps(config))
    buffers = dict(load(tmp_path / "stored")._layers.named_buffers())
    for name, scalar in scalars.items():
        assert torch.equal(buffers[name.removeprefix("model.")], scalar)


def load(folder: Path) -> TransformersModel:
    model = startup.load(CPU, folder, "float32", "").decoder
    assert isinstance(model, TransformersModel)
    return model
