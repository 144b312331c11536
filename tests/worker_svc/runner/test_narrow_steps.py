"""The fused layers with weights in 4 and 8 bits: their tokens are those of the dequantized twin.

The runner of CUDA on the CPU, by Triton's interpreter.
"""

from pathlib import Path

import pytest
import torch

from tests.worker_svc.conftest import make_prompt
from tests.worker_svc.models.test_models import QWEN2, SHAPE
from tests.worker_svc.quantized_checkpoints import (
    gptq,
    save_quantized,
)
from tests.worker_svc.random_models import save_random_model
from tests.worker_svc.runner.test_step_graphs import (
    CPU,
    DRAWN,
    LIMITS,
    Launch,
    Launches,
    cache,
    enter,
    play,
    pytestmark,
)
from worker_svc.models import compiled, load_model
from worker_svc.models.linear import Linear
from worker_svc.models.stored.narrow_gemms import NarrowLinear
from worker_svc.runner.eager_runner import EagerRunner
from worker_svc.runner.model_runner import ModelRunner

__all__ = ["pytestmark"]

SIZES = SHAPE | {
    "vocab_size": LIMITS.vocab_size,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
}


def interpreted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> ModelRunner:
    """Fused layers on the CPU, and no graph around what graphs launch."""
    from worker_svc.runner.cuda_runner import CudaRunner  # noqa: PLC0415 - Triton must interpret

    monkeypatch.setattr(compiled, "supports", lambda config: False)
    monkeypatch.setattr(Linear, "pack", lambda linear: None)
    model = load_model(folder, torch.float32, CPU, LIMITS.max_model_len)
    model.fused = model._fuse()
    layers = model.fused._layers
    assert all(isinstance(layer.o, NarrowLinear) for layer in layers)
    assert not model.fused.has_plain_weights and model.fused.library_weights() == {}
    runner = CudaRunner(model, cache(model), LIMITS, CPU)
    graphs, decodes = runner._step_graphs, runner._decode_graphs
    graphs._beginnings = {n: Launch(graphs._begin, graphs._layers, n) for n in graphs.sizes}
    graphs._decodes = {
        n: Launch(graphs._begin, graphs._layers, n, True) for n in graphs.decode_sizes
    }
    monkeypatch.setattr(graphs, "_endings", Launches(graphs._end))
    monkeypatch.setattr(decodes, "_graphs", Launches(decodes._step))
    return runner


def test_steps_with_narrow_weights_give_the_tokens_of_the_twin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = gptq(group=32, symmetric=False)
    save_random_model(tmp_path / "plain", QWEN2, SIZES)  # which has biases
    save_quantized(tmp_path / "plain", tmp_path / "q", tmp_path / "twin", form)
    twin = load_model(tmp_path / "twin", torch.float32, CPU, LIMITS.max_model_len)
    eager = EagerRunner(twin, cache(twin), LIMITS, CPU)
    new = (enter(1, make_prompt(9)), enter(2, make_prompt(5), DRAWN))
    steps = [({1: 9, 2: 5}, new), ({1: 1, 2: 1}, ())]
    expected = play(eager, *steps)
    runner = interpreted(tmp_path / "q", monkeypatch)
    assert play(runner, *steps) == expected
