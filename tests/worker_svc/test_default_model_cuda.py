"""The default model on a GPU: real weights, real language, against transformers on the same GPU."""

import dataclasses
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from default_model.folder import ensure
from worker_svc.config import WorkerConfig

from .test_cuda_runner import BLOCKS_PER_SEQ, GREEDY, Client, generate, make_runner

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

NUM_TOKENS = 64
CLOSE_CALL = 1e-3  # two best logits closer than this may go either way
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
CONFIG = WorkerConfig(
    dtype="float32",
    device="cuda",
    num_kv_blocks=1 + len(TEXTS) * BLOCKS_PER_SEQ,
    max_num_seqs=len(TEXTS),
    max_num_batched_tokens=512,
    max_model_len=192,
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


@torch.inference_mode()
def first_difference(theirs: torch.nn.Module, prompt: list[int], output: list[int]) -> int | None:
    """Where transformers would have chosen otherwise; None: nowhere, or only in a close call."""
    token_ids = torch.tensor([prompt + output[:-1]], device="cuda")
    best = theirs(token_ids).logits[0, len(prompt) - 1 :].topk(2, dim=-1)
    for position, token in enumerate(output):
        first, second = best.values[position].tolist()
        if first - second < CLOSE_CALL:
            return None
        if best.indices[position, 0].item() != token:
            return position
    return None


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
    seen = []
    vocab_part = runner._model.vocab_part
    runner._model.vocab_part = lambda hidden: seen.append(vocab_part(hidden)) or seen[-1]
    client = Client(runner)
    prompt = prompts[5]
    client.launch({0: len(prompt)}, new_sequences=(client.enter(0, prompt, GREEDY),))
    client.drain()
    with torch.inference_mode():
        expected = theirs(torch.tensor([prompt], device="cuda")).logits[0, -1]
    distance = (seen[0].logits[0].float() - expected).norm() / expected.norm()
    assert distance < 0.05  # 30 layers, each rounding to 8 bits
