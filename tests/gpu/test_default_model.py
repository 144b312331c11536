"""The default model on a GPU, with real text, against transformers on the same GPU."""

import dataclasses
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from default_model.folder import ensure
from tests.gpu import test_cuda_runner
from tests.gpu.test_cuda_runner import BLOCKS_PER_SEQ, distance_of_logits, generate, make_runner
from tests.oracle import first_difference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

NUM_TOKENS = 64
TEXTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time there was a",
    "Die Katze sitzt auf",
    "Q: What is 2 + 2?\nA:",
    "The quick brown fox jumps over the lazy dog. " * 6,
    "!",
    "In 1969, Neil Armstrong",
]
CONFIG = dataclasses.replace(
    test_cuda_runner.CONFIG,
    num_kv_blocks=1 + len(TEXTS) * BLOCKS_PER_SEQ,
    max_num_seqs=len(TEXTS),
)


@pytest.fixture(scope="module")
def folder() -> Path:
    return ensure()


@pytest.fixture(scope="module")
def prompts(folder: Path) -> dict[int, list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return {slot: tokenizer(text)["input_ids"] for slot, text in enumerate(TEXTS)}


@pytest.fixture(scope="module")
def theirs(folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).cuda().eval()


def test_greedy_outputs_are_those_of_transformers(
    folder: Path, prompts: dict[int, list[int]], theirs: torch.nn.Module
) -> None:
    runner = make_runner(folder, CONFIG)
    together = generate(runner, prompts, NUM_TOKENS)
    for slot, prompt in prompts.items():
        assert first_difference(theirs, prompt, together[slot]) is None, TEXTS[slot]
        alone = generate(runner, {slot: prompt}, NUM_TOKENS)[slot]
        assert first_difference(theirs, prompt, alone) is None, TEXTS[slot]


def test_bfloat16_logits_are_close_to_those_of_float32(
    folder: Path, prompts: dict[int, list[int]], theirs: torch.nn.Module
) -> None:
    runner = make_runner(folder, dataclasses.replace(CONFIG, dtype="bfloat16"))
    # 30 layers, each rounds to 8 bits.
    assert distance_of_logits(runner, theirs, prompts[5]) < 0.05
