"""SmolLM3: which layers rotate, what its config.json leaves out, and tokens like transformers'."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, SmolLM3Config, SmolLM3ForCausalLM

from tests.worker_svc.models.configs import read
from tests.worker_svc.models.test_config import rotations
from tests.worker_svc.models.test_models import MAX_MODEL_LEN, NO_IDS, SHAPE, Steps, make_prompts
from tests.worker_svc.random_models import save_random_model
from worker_svc.models import load_model
from worker_svc.models.rope import RotaryConfig
from worker_svc.models.spec import ModelSpec

NUM_TOKENS = 12


def rotating(spec: ModelSpec) -> list[int]:
    return [int(layer.mixer.rope is not None) for layer in spec.layers]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [1, 1, 1, 0, 1, 1]),
        ({"no_rope_layer_interval": ...}, [1, 1, 1, 0, 1, 1]),
        ({"no_rope_layer_interval": 2}, [1, 0, 1, 0, 1, 0]),
        ({"no_rope_layer_interval": 1}, [0, 0, 0, 0, 0, 0]),
        ({"no_rope_layers": [0, 1, 1, 1, 1, 0]}, [0, 1, 1, 1, 1, 0]),
        ({"no_rope_layers": [1, 1, 1, 1, 1, 0, 0, 0]}, [1, 1, 1, 1, 1, 0]),
        ({"no_rope_layers": None}, [1, 1, 1, 0, 1, 1]),
    ],
)
def test_the_layers_without_rotation_are_those_that_the_config_says(
    tmp_path: Path, changes: dict[str, Any], expected: list[int]
) -> None:
    assert rotating(read(tmp_path, "smollm3-3b", **changes)) == expected


def test_what_a_config_leaves_out_is_as_in_transformers(tmp_path: Path) -> None:
    spec = read(tmp_path, "smollm3-3b", rope_theta=..., no_rope_layers=[1] * 6)
    theirs = SmolLM3Config()
    assert rotations(spec) == [RotaryConfig(theirs.rope_parameters["rope_theta"])] * 6
    assert spec.tie_word_embeddings == theirs.tie_word_embeddings
    assert not read(tmp_path, "smollm3-3b", tie_word_embeddings=False).tie_word_embeddings


@pytest.mark.parametrize(
    "changes",
    [
        {"use_sliding_window": True, "sliding_window": None},
        {"use_sliding_window": False, "sliding_window": 128},
        {"layer_types": ["full_attention"] * 6},
    ],
)
def test_a_window_that_no_layer_has_is_accepted(tmp_path: Path, changes: dict[str, Any]) -> None:
    read(tmp_path, "smollm3-3b", **changes).check_length(512)


def test_layers_that_do_not_rotate_have_the_window(tmp_path: Path) -> None:
    spec = read(tmp_path, "smollm3-3b", use_sliding_window=True, sliding_window=128)
    assert [layer.mixer.window for layer in spec.layers] == [None] * 3 + [128] + [None] * 2


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    """Five layers, of which the fourth does not rotate; heads of 16, which all kernels serve."""
    folder = tmp_path_factory.mktemp("smollm3")
    shape = SHAPE | {"hidden_size": 64, "num_hidden_layers": 5, "num_key_value_heads": 2}
    return folder, save_random_model(folder, (SmolLM3Config, SmolLM3ForCausalLM), shape | NO_IDS)


def greedy(theirs: PreTrainedModel, prompt: Tensor) -> list[int]:
    ids = prompt[None]
    out = theirs.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, do_sample=False
    )
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("kernels", ["0", "1"])
def test_greedy_tokens_are_those_of_transformers(
    checkpoint: tuple[Path, PreTrainedModel], kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two sequences together: one in chunks, one whole."""
    monkeypatch.setenv("PAGEWIRE_CPU_KERNELS", kernels)
    folder, theirs = checkpoint
    prompts = make_prompts(40, 7)
    expected = [greedy(theirs, prompt) for prompt in prompts]
    ours = load_model(folder, torch.float32, torch.device("cpu"), MAX_MODEL_LEN)
    assert (ours.attention_backend == "torch") == (kernels == "0")
    sequences = [
        torch.cat((prompt, torch.tensor(tokens)))
        for prompt, tokens in zip(prompts, expected, strict=True)
    ]
    steps = Steps(ours, sequences)
    steps.run({0: 16})
    last = steps.run({0: 24, 1: 7})
    found = [[int(logits[-1].argmax())] for logits in last]
    for _ in range(NUM_TOKENS - 1):
        for tokens, logits in zip(found, steps.run({0: 1, 1: 1}), strict=True):
            tokens.append(int(logits[-1].argmax()))
    assert found == expected
