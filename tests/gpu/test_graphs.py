"""Decode steps by CUDA graphs equal the same steps launched kernel by kernel, for each size."""

import dataclasses
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.gpu import test_cuda_runner
from tests.gpu.test_cuda_runner import BLOCKS_PER_SEQ, SHAPE, generate, make_prompt, make_runner
from tests.worker_svc.random_models import save_random_model
from worker_svc.runner.graphs.decode_graphs import batch_sizes
from worker_svc.runner.model_runner import ModelRunner

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

MAX_NUM_SEQS = 130
NUM_TOKENS = 5
CONFIG = dataclasses.replace(
    test_cuda_runner.CONFIG,
    num_kv_blocks=1 + MAX_NUM_SEQS * BLOCKS_PER_SEQ,
    max_num_seqs=MAX_NUM_SEQS,
    max_num_batched_tokens=4096,
)
NEAR_CAPTURED = {size + by for size in batch_sizes(MAX_NUM_SEQS) for by in (-1, 0, 1)}
SIZES = sorted(size for size in {*range(1, 65), *NEAR_CAPTURED} if 1 <= size <= MAX_NUM_SEQS)


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    folder: Path = tmp_path_factory.mktemp("models") / "qwen3"
    save_random_model(folder, (Qwen3Config, Qwen3ForCausalLM), SHAPE)
    return make_runner(folder, CONFIG)


def test_graphs_give_the_tokens_of_eager_steps_at_every_size(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = {slot: make_prompt(3 + slot % 29, seed=slot) for slot in range(MAX_NUM_SEQS)}
    for size in SIZES:
        rows = {slot: prompts[slot] for slot in range(size)}
        by_graph = generate(runner, rows, NUM_TOKENS)
        with monkeypatch.context() as patch:
            patch.setattr(runner, "_is_plain", lambda staged: False)
            patch.setattr(runner._step_graphs, "map", lambda rows: None)
            by_kernels = generate(runner, rows, NUM_TOKENS)
        assert by_graph == by_kernels, size
