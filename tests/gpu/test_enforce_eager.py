"""--enforce-eager on a GPU: a runner that records no graphs, and the tokens of one that does."""

import dataclasses
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.gpu.test_cuda_runner import CONFIG, SHAPE, generate, make_prompt, make_runner
from tests.worker_svc.random_models import save_random_model
from worker_svc.runner.eager_runner import EagerRunner

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

NUM_TOKENS = 8


def test_it_records_no_graphs_and_gives_the_same_tokens(tmp_path: Path) -> None:
    save_random_model(tmp_path, (Qwen3Config, Qwen3ForCausalLM), SHAPE)
    prompts = {slot: make_prompt(3 + 7 * slot, seed=slot) for slot in range(6)}
    by_graphs = generate(make_runner(tmp_path, CONFIG), prompts, NUM_TOKENS)
    eager = make_runner(tmp_path, dataclasses.replace(CONFIG, enforce_eager=True))
    assert isinstance(eager, EagerRunner) and not eager.graph_batch_sizes
    assert generate(eager, prompts, NUM_TOKENS) == by_graphs
