"""The default model in float32 gives transformers' tokens by torch and with every instruction set.

The first tokens of all prompts are computed in one step, then decoded together. Each way has a
third of fifty prompts, and every prompt is in one of three ways; PAGEWIRE_ALL_TOKENS=1 gives each
way all fifty.
"""

import os
from collections.abc import Callable
from itertools import chain

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from default_model.folder import ensure
from kernels.cpu import isa
from tests.e2e.test_greedy_oracle import QUESTIONS, TEXTS
from tests.oracle import first_differences
from worker_svc.attention.batch import AttentionBatch
from worker_svc.models import Decoder, load_model

NUM_TOKENS, BLOCK_SIZE = 4, 16
EVERY = 1 if os.environ.get("PAGEWIRE_ALL_TOKENS") else 3
WAYS = ["torch", *(one.name for one in isa.available())]
CPU = torch.device("cpu")
Prompts = list[list[int]]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def prompts() -> Prompts:
    tokenizer = AutoTokenizer.from_pretrained(ensure())
    chats = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        for question in QUESTIONS
    ]
    return [*chats, *(tokenizer(text)["input_ids"] for text in TEXTS)]


@pytest.fixture(scope="module")
def differing(prompts: Prompts) -> Callable[[dict[int, tuple[int, ...]]], list[int]]:
    """Outputs by their prompts' numbers to those that transformers would continue differently.

    Cached by output.
    """
    oracle = AutoModelForCausalLM.from_pretrained(ensure(), dtype=torch.float32).eval()
    judged: dict[tuple[int, tuple[int, ...]], bool] = {}

    def judge(outputs: dict[int, tuple[int, ...]]) -> list[int]:
        new = [pair for pair in outputs.items() if pair not in judged]
        found = first_differences(
            oracle, [prompts[index] for index, _ in new], [list(output) for _, output in new]
        )
        judged.update((pair, one is not None) for pair, one in zip(new, found, strict=True))
        return [pair[0] for pair in outputs.items() if judged[pair]]

    return judge


def generate(model: Decoder, prompts: Prompts) -> list[tuple[int, ...]]:
    """Greedy outputs: one step for all prompts, then one step per token of all."""
    width = -(-(max(map(len, prompts)) + NUM_TOKENS) // BLOCK_SIZE)
    cache = model.new_cache(1 + width * len(prompts), BLOCK_SIZE)
    tables = torch.arange(1, 1 + width * len(prompts), dtype=torch.int32).view(len(prompts), width)
    sequences = [list(prompt) for prompt in prompts]
    num_computed = [0] * len(prompts)
    for _ in range(NUM_TOKENS):
        new = [s[n:] for s, n in zip(sequences, num_computed, strict=True)]
        at = [torch.arange(n, len(s)) for s, n in zip(sequences, num_computed, strict=True)]
        slots = [
            table.long()[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE
            for table, p in zip(tables, at, strict=True)
        ]
        lens = torch.tensor(list(map(len, sequences)), dtype=torch.int32)
        starts = torch.tensor([0, *map(len, new)]).cumsum(0).int()
        batch = AttentionBatch(
            torch.cat(slots), tables, lens, starts, max(map(len, new)), int(lens.max())
        )
        hidden = model.forward(
            torch.tensor(list(chain.from_iterable(new))), torch.cat(at), cache, batch
        )
        best = model.logits(hidden[starts[1:].long() - 1]).argmax(-1).tolist()
        num_computed = list(map(len, sequences))
        for sequence, token in zip(sequences, best, strict=True):
            sequence.append(token)
    return [tuple(s[len(p) :]) for s, p in zip(sequences, prompts, strict=True)]


@pytest.mark.parametrize("name", WAYS)
def test_fifty_prompts_equal_transformers(
    name: str,
    prompts: Prompts,
    differing: Callable[[dict[int, tuple[int, ...]]], list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if name == "torch":
        monkeypatch.setenv("PAGEWIRE_CPU_KERNELS", "0")
    else:
        monkeypatch.setenv(isa.VARIABLE, name)
    model = load_model(ensure(), torch.float32, CPU, max_model_len=512)
    assert model.attention_backend in (f"c/{name}", "torch")
    assert len(prompts) == 50
    chosen = range(WAYS.index(name) % EVERY, len(prompts), EVERY)
    outputs = generate(model, [prompts[index] for index in chosen])
    assert differing(dict(zip(chosen, outputs, strict=True))) == []
