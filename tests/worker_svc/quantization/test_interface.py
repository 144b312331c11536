"""A method of a test's own: asked for every linear layer, and refused on too old a device."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.worker_svc.models.test_models import MAX_MODEL_LEN
from worker_svc.models import Decoder
from worker_svc.models import config as model_config
from worker_svc.models.stored.quantized import QuantizedLayers, load_quantized
from worker_svc.process import host_memory
from worker_svc.process.host_memory import own_bytes
from worker_svc.quantization import registry
from worker_svc.quantization.scheme import (
    FLOATS,
    Axis,
    RankCut,
    Scheme,
    StoredWeight,
    TensorSpec,
    UnsupportedQuantization,
)

CPU = torch.device("cpu")


@dataclass
class Halved:
    """Weights stored as their halves."""

    min_capability: int = 90
    label: str = "halved"
    asked: list[str] = field(default_factory=list)
    num_read: int = 0

    def scheme(self, name: str) -> Scheme:
        self.asked.append(name)
        return self

    def tensors(self, num_outputs: int, num_inputs: int) -> Mapping[str, TensorSpec]:
        return {"half": TensorSpec((num_outputs, num_inputs), FLOATS, Axis(0), Axis(1))}

    def read(self, found: Mapping[str, Tensor], cut: RankCut) -> StoredWeight:
        self.num_read += 1
        return found["half"] * 2


def test_a_method_is_asked_for_every_linear_layer_and_its_tensors_are_read(
    plain: Mapping[str, Path], tmp_path: Path
) -> None:
    halved = Halved()
    methods: dict[str, registry.Reader] = {"halved": lambda given: halved}
    given: dict[str, Any] = {"quant_method": "halved"}
    assert registry.of_checkpoint(given, methods) is halved
    tensors = load_file(plain["llama"] / "model.safetensors")
    layers = [name for name in tensors if "_proj" in name or "lm_head" in name]
    for name in layers:
        tensors[name.replace(".weight", ".half")] = tensors.pop(name) / 2
    save_file(tensors, tmp_path / "model.safetensors")

    model = Decoder(model_config.load(plain["llama"]), torch.float32, CPU, MAX_MODEL_LEN)
    destinations = dict(model.destinations())
    load_quantized(tmp_path, halved, destinations, frozenset(), model.sharding.share, CPU)
    assert sorted(f"{name}.weight" for name in halved.asked) == sorted(layers)
    assert halved.num_read == len(layers) == 15
    wanted = load_file(plain["llama"] / "model.safetensors")["lm_head.weight"].float()
    assert torch.equal(model._head.weight, wanted)

    quantized = QuantizedLayers(halved, destinations, model.sharding.share)
    quantized.require_capability(90)
    with pytest.raises(UnsupportedQuantization, match=r"halved .* needs compute capability 90"):
        quantized.require_capability(89)


def test_the_peak_of_host_memory_is_kept_and_its_thread_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [5 << 20]
    monkeypatch.setattr(host_memory, "own_bytes", lambda: now[0])
    with host_memory.HostPeak() as host:
        now[0] = 9 << 20
        host._look()
        now[0] = 7 << 20
    assert host.report() == "9 MiB at most, 5 MiB before"
    assert not host._thread.is_alive()
    assert own_bytes() > 0 or not Path("/proc/self/statm").exists()
