"""A runner with other GEMM algorithms than torch's, on a GPU."""

import dataclasses
import logging
import re
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from kernels.gemm import cublas_lt
from kernels.gemm.cublas_lt import GemmKind, GemmShape
from tests.gpu.test_cuda_runner import BLOCKS_PER_SEQ, CONFIG, SHAPE, generate, make_prompt
from tests.oracle import shortfall
from tests.worker_svc.random_models import save_random_model
from worker_svc.models.gemm_choices import GemmChoice
from worker_svc.startup import startup
from worker_svc.tuning import gemm_choice, gemm_timing
from worker_svc.tuning.gemm_choice import Timing

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

NUM_SEQS = 40
NUM_TOKENS = 24
SERVED = dataclasses.replace(
    CONFIG,
    dtype="bfloat16",
    max_num_seqs=NUM_SEQS,
    num_kv_blocks=1 + NUM_SEQS * BLOCKS_PER_SEQ,
)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of stored GEMM choices; makes every weight large enough to be tuned."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(gemm_choice, "SMALLEST_WEIGHT", 0)
    return tmp_path / "cache"


def last_that_works(timings: list[Timing]) -> GemmChoice:
    return GemmChoice(timings[-1].algorithm, timings[-1].us, timings[0].us)


def test_chosen_products_give_the_tokens_of_the_model(
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """All GEMMs of more than 16 rows by the last candidate, however slow."""
    monkeypatch.setattr(gemm_choice, "quickest", last_that_works)
    theirs = save_random_model(tmp_path / "model", (Qwen3Config, Qwen3ForCausalLM), SHAPE)
    prompts = {slot: make_prompt(3 + slot % 9, seed=slot % 9) for slot in range(NUM_SEQS)}
    assert sum(map(len, prompts.values())) < SERVED.max_num_batched_tokens
    outputs = []
    for _ in range(2):
        loaded = startup.load(SERVED, tmp_path / "model", "bfloat16", "")
        with caplog.at_level(logging.INFO):
            runner = startup.build_runner(SERVED, loaded, SERVED.num_kv_blocks)
        runner.warm_up()
        outputs.append(generate(runner, prompts, NUM_TOKENS))
        assert startup.describe(loaded, runner, 1).gemm_choices
        # Stored choices are not measured again at the second start.
        monkeypatch.setattr(gemm_timing.GemmTimer, "measure", None)
    assert len(re.findall(r"GEMMs: (\d+) of \1 shapes by another", caplog.text)) == 2
    assert outputs[0] == outputs[1]
    for slot, prompt in prompts.items():
        assert shortfall(theirs, prompt, outputs[0][slot]) < 0.2


def test_torch_is_left_alone_where_that_is_asked_for(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gemm_timing.GemmTimer, "measure", None)
    save_random_model(tmp_path / "model", (Qwen3Config, Qwen3ForCausalLM), SHAPE)
    config = dataclasses.replace(SERVED, gemm_algorithms="torch")
    loaded = startup.load(config, tmp_path / "model", "bfloat16", "")
    startup.build_runner(config, loaded, config.num_kv_blocks)
    assert not list(cache.glob("pagewire-gemms-*"))


@torch.inference_mode()
def test_the_clock_tells_torchs_time_first_and_each_algorithm_once() -> None:
    device = torch.device("cuda")
    library = cublas_lt.open_on(device)
    assert library is not None
    kind = GemmKind(4096, 4096, torch.bfloat16, adds=False)
    weights = {kind: [torch.randn(4096, 4096, device=device).bfloat16() for _ in range(4)]}
    timings = gemm_timing.GemmTimer(library, weights, device).measure(GemmShape(64, kind))
    algorithms = [timing.algorithm for timing in timings]
    assert algorithms[0] is None
    assert None not in algorithms[1:]
    assert len(set(algorithms)) == len(algorithms) > 1
    # Reading 32 MiB takes more than 4 us and less than a millisecond.
    assert all(4 < timing.us < 1000 for timing in timings)
