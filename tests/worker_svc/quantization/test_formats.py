"""Each format's checkpoint computes what its dequantized twin computes."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.worker_svc.models.test_models import LLAMA, MAX_MODEL_LEN, QWEN2, QWEN3, SHAPE, Steps
from tests.worker_svc.quantized_checkpoints import FORMATS, save_quantized
from tests.worker_svc.random_models import save_random_model
from worker_svc.models import load_model

CPU = torch.device("cpu")
SIZES = SHAPE | {"hidden_size": 64, "intermediate_size": 96, "num_key_value_heads": 2}
FAMILIES = {"llama": LLAMA, "qwen2": QWEN2, "qwen3": QWEN3}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of each family in bfloat16."""
    folders = {}
    for name, family in FAMILIES.items():
        folders[name] = tmp_path_factory.mktemp(name)
        save_random_model(folders[name], family, SIZES)
    return folders


def logits_and_tokens(folder: Path, dtype: torch.dtype, prompt: Tensor) -> tuple[Tensor, list[int]]:
    """Logits of a prompt, and the tokens after it by greedy choice."""
    model = load_model(folder, dtype, CPU, MAX_MODEL_LEN)
    steps = Steps(model, [torch.cat([prompt, torch.zeros(24, dtype=torch.long)])])
    logits = steps.run({0: len(prompt)})[0]
    tokens, last = [], logits[-1]
    for _ in range(16):
        tokens.append(int(last.argmax()))
        steps._prompts[0][len(prompt) + len(tokens) - 1] = tokens[-1]
        last = steps.run({0: 1})[0][-1]
    return logits, tokens


@pytest.mark.parametrize("name", FORMATS)
def test_logits_and_tokens_are_those_of_the_dequantized_twin(
    name: str, plain: dict[str, Path], tmp_path: Path
) -> None:
    family = list(FAMILIES)[list(FORMATS).index(name) % len(FAMILIES)]
    folder, twin = tmp_path / "quantized", tmp_path / "twin"
    save_quantized(plain[family], folder, twin, FORMATS[name])
    prompt = torch.randint(0, 96, (30,), generator=torch.Generator().manual_seed(2))
    found, tokens = logits_and_tokens(folder, torch.float32, prompt)
    expected, wanted = logits_and_tokens(twin, torch.float32, prompt)
    assert expected.abs().max() > 0.5  # logits near 0 would prove nothing
    assert (found - expected).abs().max() < 1e-4
    assert tokens == wanted
