"""Small checkpoints in bfloat16 to quantize, and what they compute."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.worker_svc.models.test_models import LLAMA, MAX_MODEL_LEN, QWEN2, QWEN3, SHAPE, Steps
from tests.worker_svc.random_models import save_random_model
from worker_svc.models import Decoder

SIZES = SHAPE | {"hidden_size": 64, "intermediate_size": 128, "num_key_value_heads": 2}
FAMILIES = {"llama": LLAMA, "qwen2": QWEN2, "qwen3": QWEN3}


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """A checkpoint of each family."""
    folders = {}
    for name, family in FAMILIES.items():
        folders[name] = tmp_path_factory.mktemp(name)
        save_random_model(folders[name], family, SIZES)
    return folders


def logits_and_tokens(model: Decoder, num_tokens: int = 16) -> tuple[Tensor, list[int]]:
    """Logits of a prompt, and the tokens after it by greedy choice."""
    prompt = torch.randint(0, 96, (30,), generator=torch.Generator().manual_seed(2))
    text = torch.cat([prompt, torch.zeros(num_tokens, dtype=torch.long)])
    assert len(text) <= MAX_MODEL_LEN
    steps = Steps(model, [text])
    logits = steps.run({0: len(prompt)})[0]
    tokens: list[int] = []
    last = logits[-1]
    for at in range(len(prompt), len(text)):
        text[at] = int(last.argmax())
        tokens.append(int(text[at]))
        last = steps.run({0: 1})[0][-1]
    return logits, tokens
