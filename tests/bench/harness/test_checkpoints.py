"""Checkpoints for benchmarks are such as the worker serves."""

import json

import torch
from safetensors.torch import load_file

from bench.harness import checkpoints
from worker_svc.config import WorkerConfig
from worker_svc.quantization import compressed
from worker_svc.quantization.scheme import RankCut
from worker_svc.startup import startup

NAME = "model.layers.0.mlp.down_proj"


def test_a_checkpoint_in_4_bits_is_served_with_weights_as_large_as_plain_ones(tmp_path) -> None:
    folder = checkpoints.write(tmp_path, "tiny", int4_group=32)
    loaded = startup.load(WorkerConfig(device="cpu"), folder, "auto", "")
    assert "4 bits, group 32" in loaded.facts.quantization
    settings = json.loads((folder / "config.json").read_text())["quantization_config"]
    scheme = compressed.Compressed.of(settings).scheme(NAME)
    tensors = load_file(folder / "part-1.safetensors")
    found = {key: tensors[f"{NAME}.{key}"] for key in scheme.tensors(64, 128)}
    weight = scheme.read(found, RankCut((64, 128), range(64), range(128))).dequantized()
    torch.testing.assert_close(weight.std(), torch.tensor(0.02), rtol=0.1, atol=0.0)
