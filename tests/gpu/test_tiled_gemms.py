"""A runner with all GEMMs of 3 to 32 rows by the tiled kernel, on a GPU."""

import dataclasses
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from tests.gpu.test_cuda_runner import (
    BLOCKS_PER_SEQ,
    CONFIG,
    SHAPE,
    generate,
    make_prompt,
    make_runner,
)
from tests.oracle import shortfall
from tests.worker_svc.random_models import save_random_model
from worker_svc.runner.model_runner import ModelRunner

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

NUM_SEQS = 32
NUM_TOKENS = 16
SERVED = dataclasses.replace(
    CONFIG,
    dtype="bfloat16",
    max_num_seqs=NUM_SEQS,
    num_kv_blocks=1 + NUM_SEQS * BLOCKS_PER_SEQ,
)
WIDE = {
    "hidden_size": 3072,
    "intermediate_size": 3200,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "initializer_range": 0.04,
}


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("models") / "wide"
    model = save_random_model(folder, (Qwen3Config, Qwen3ForCausalLM), SHAPE | WIDE)
    return folder, model.cuda()


@pytest.fixture(scope="module")
def runner(theirs: tuple[Path, PreTrainedModel]) -> ModelRunner:
    return make_runner(theirs[0], SERVED)


def test_every_product_of_the_model_is_one_that_the_kernel_pays_for(runner: ModelRunner) -> None:
    fused = runner._model.fused
    assert fused is not None
    for layer in fused._layers:
        for linear in (layer.qkv, layer.o, layer.feed.gate_up, layer.feed.down):
            assert linear.arrived is not None


@pytest.mark.parametrize("num_rows", [3, 8, 20, 32])
def test_its_tokens_are_as_likely_as_the_models_own(
    num_rows: int, runner: ModelRunner, theirs: tuple[Path, PreTrainedModel]
) -> None:
    prompts = {slot: make_prompt(3 + slot % 9, seed=slot) for slot in range(num_rows)}
    for slot, tokens in generate(runner, prompts, NUM_TOKENS).items():
        assert shortfall(theirs[1], prompts[slot], tokens) < 0.2


def test_graphs_give_the_tokens_of_eager_steps(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = {slot: make_prompt(3 + slot % 9, seed=slot) for slot in range(24)}
    by_graph = generate(runner, prompts, NUM_TOKENS)
    monkeypatch.setattr(runner, "_is_plain", lambda staged: False)
    monkeypatch.setattr(runner._step_graphs, "map", lambda rows: None)
    assert generate(runner, prompts, NUM_TOKENS) == by_graph
