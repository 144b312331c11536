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
from tests.worker_svc.runner.interpreted import (
    CPU,
    LIMITS,
    cache,
    needs_interpreter,
    without_graphs,
)
from tests.worker_svc.runner.test_step_graphs import DRAWN, enter, play
from worker_svc.models import compiled, load_model
from worker_svc.models.linear import Linear
from worker_svc.models.stored.narrow_gemms import NarrowLinear
from worker_svc.runner.eager_runner import EagerRunner
from worker_svc.runner.model_runner import ModelRunner

pytestmark = needs_interpreter

SIZES = SHAPE | {
    "vocab_size": LIMITS.vocab_size,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
}


def interpreted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> ModelRunner:
    """The runner of CUDA with weights in few bits."""
    monkeypatch.setattr(compiled, "supports", lambda heads, kinds: False)
    monkeypatch.setattr(Linear, "pack", lambda linear: None)
    model = load_model(folder, torch.float32, CPU, LIMITS.max_model_len)
    runner = without_graphs(model, monkeypatch)
    assert model.fused is not None
    layers = model.fused._layers
    assert all(isinstance(layer.o, NarrowLinear) for layer in layers)
    assert not model.fused.has_plain_weights and model.fused.library_weights() == {}
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
